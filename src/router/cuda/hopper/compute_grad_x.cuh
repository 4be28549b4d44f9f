#pragma once

#include "ops/cuda/element.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "router/cuda/hopper/grad_tile.cuh"

// The role of gradients_kernel that computes grad_x. For code that is compiled for sm_90a only.

namespace crossdock::router::hopper {

/// The product of 64 tokens with the gate: experts ascending, for each the smallest parts first.
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
  ops::hopper::wait_for_products<0>();
  ops::hopper::settle(sums);
}

/// Puts results in the place of 64 columns of grad_x, or adds them to what is there. The copy
/// engine swizzles: piece p (16 bytes) of row r is at the place of piece p ^ (r % 8).
template <bool kAccumulates>
__device__ __forceinline__ void put(const float* sums, SharedAddress block) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const SharedAddress line = block + (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
  const auto place = [&](int j, int half) { return line + half * 8 * 128 + ((j ^ lane / 4) << 4); };
  uint32_t before[8][2];  // read in advance
  if constexpr (kAccumulates) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(before[j][half]) : "r"(place(j, half)));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 sum = make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
      if constexpr (kAccumulates) {
        const float2 old = ops::unpack<BF16>(before[j][half]);
        sum = make_float2(old.x + sum.x, old.y + sum.y);
      }
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(place(j, half)),
                   "r"(ops::pack<BF16>(sum.x, sum.y))
                   : "memory");
    }
  }
}

/// grad_x of all tokens of the slice, by a warpgroup.
template <typename Tile>
__device__ void compute_grad_x(const GradientsArgs& args, const GradPart<Tile>& part,
                               GradBarriers<Tile>& barriers) {
  SlotPlace parts{Tile::kPartsSlots};
  SlotPlace rows{Tile::kRowsSlots};
  ops::hopper::wait(barriers.has_gate, 0);
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    float sums[Tile::kColumns / 2];
    ops::hopper::wait(barriers.parts.full[parts.slot], parts.parity);
    multiply_gate<Tile>(sums, part.parts(parts.slot), part.gate);
    barriers.parts.release_in_both(parts.slot);
    ops::hopper::wait(barriers.grad_x.full[rows.slot], rows.parity);
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      const SharedAddress to = part.grad_x(rows.slot) + block * kBlockBytes;
      if (args.accumulates_x) {
        put<true>(sums + block * (kBlock / 2), to);
      } else {
        put<false>(sums + block * (kBlock / 2), to);
      }
    }
    publish_shared_memory();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ops::hopper::arrive(barriers.is_computed[rows.slot]);
    parts.advance();
    rows.advance();
  }
}

}  // namespace crossdock::router::hopper
