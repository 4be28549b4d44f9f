#pragma once

#include "ops/cuda/element.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "router/cuda/hopper/grad_tile.cuh"

// The role of gradients_kernel that computes grad_x. For code that is compiled for sm_90a only.

namespace crossdock::router::hopper {

/// Starts the product of 64 tokens with the gate: experts ascending, for each the smallest parts
/// first.
template <typename Tile>
__device__ __forceinline__ void multiply_gate(float (&sums)[Tile::kColumns / 2],
                                              SharedAddress parts, SharedAddress gate) {
  using A = ops::hopper::WgmmaOperand<false>;
  using B = ops::hopper::WgmmaOperand<true>;
  ops::hopper::begin_products();
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    const uint64_t b =
        B::descriptor(gate + step / 4 * Tile::kColumnBlocks * kBlockBytes) + step % 4 * B::kPart;
#pragma unroll
    for (int part = 0; part < kNumParts; ++part) {
      const uint64_t a =
          A::descriptor(parts + (step / 4 * kNumParts + part) * kBlockBytes) + step % 4 * A::kPart;
      ops::hopper::Wgmma<BF16, Tile::kColumns>::template multiply<false, true>(
          sums, a, b, step > 0 || part > 0);
    }
  }
  ops::hopper::commit_products();
}

/// A thread's values in a slot of grad_x, pairs of neighbours in the order of the sums. The copy
/// engine swizzles: piece p (16 bytes) of row r is at the place of piece p ^ (r % 8).
template <typename Tile>
class PairsInSlot {
 public:
  static constexpr int kCount = Tile::kColumns / 4;

  __device__ explicit PairsInSlot(SharedAddress slot) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    line_ = slot + (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
    row_ = lane / 4;
  }

  __device__ uint32_t read(int i) const {
    uint32_t pair;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(place(i)));
    return pair;
  }
  __device__ void write(int i, uint32_t pair) const {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(place(i)), "r"(pair) : "memory");
  }

 private:
  __device__ SharedAddress place(int i) const {
    return line_ + i / 16 * kBlockBytes + i % 2 * 8 * 128 + ((i / 2 % 8 ^ row_) << 4);
  }

  SharedAddress line_;
  int row_;
};

/// grad_x of all tokens of the slice, by a warpgroup.
template <typename Tile>
__device__ void compute_grad_x(const GradientsArgs& args, const GradPart<Tile>& part,
                               GradBarriers<Tile>& barriers) {
  using Pairs = PairsInSlot<Tile>;
  SlotPlace parts{Tile::kPartsSlots};
  SlotPlace rows{Tile::kRowsSlots};
  ops::hopper::wait(barriers.has_gate, 0);
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    float sums[Tile::kColumns / 2];
    uint32_t before[Pairs::kCount] = {};
    const Pairs pairs(part.grad_x(rows.slot));
    ops::hopper::wait(barriers.parts.full[parts.slot], parts.parity);
    multiply_gate<Tile>(sums, part.parts(parts.slot), part.gate);
    ops::hopper::wait(barriers.grad_x.full[rows.slot], rows.parity);
    if (args.accumulates_x) {
#pragma unroll
      for (int i = 0; i < Pairs::kCount; ++i) before[i] = pairs.read(i);
    }
    ops::hopper::wait_for_products<0>();
    ops::hopper::settle(sums);
    barriers.release_parts(parts.slot);
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      const float2 old = ops::unpack<BF16>(before[i]);
      const float first = args.accumulates_x ? old.x + sums[2 * i] : sums[2 * i];
      const float second = args.accumulates_x ? old.y + sums[2 * i + 1] : sums[2 * i + 1];
      pairs.write(i, ops::pack<BF16>(first, second));
    }
    publish_shared_memory();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ops::hopper::arrive(barriers.is_computed[rows.slot]);
    parts.advance();
    rows.advance();
  }
}

}  // namespace crossdock::router::hopper
