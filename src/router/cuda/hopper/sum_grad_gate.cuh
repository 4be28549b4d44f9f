#pragma once

#include "ops/cuda/hopper/wgmma.cuh"
#include "ops/gemm.hpp"
#include "router/cuda/hopper/grad_tile.cuh"

// The role of gradients_kernel that computes grad_gate. For code that is compiled for sm_90a only.

namespace crossdock::router::hopper {

/// Tokens of a step that are padding, a bit for each.
class Padding {
 public:
  __device__ Padding(const int32_t* sequences, int token, int end_token)
      : sequences_(sequences), token_(token + static_cast<int>(threadIdx.x) % 32), end_(end_token) {
    read();
  }

  /// Those of the next step, by a whole warp.
  __device__ uint64_t next() {
    const uint64_t high = __ballot_sync(~0u, is_padding_[1]);
    const uint64_t bits = high << 32 | __ballot_sync(~0u, is_padding_[0]);
    token_ += kBlock;
    read();
    return bits;
  }

 private:
  __device__ void read() {  // in advance
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = token_ + half * 32;
      is_padding_[half] = token < end_ && sequences_[token] < 0;
    }
  }

  const int32_t* sequences_;
  int token_;
  int end_;
  bool is_padding_[2];
};

/// Zeroes the rows of x in a slot that are padding. By all threads that sum grad_gate.
template <typename Tile>
__device__ void zero_padding(uint64_t padding, SharedAddress x) {
  constexpr int kPieces = 128 / 16;
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kColumnBlocks * kBlock * kPieces;
       i += Tile::kSumThreads) {
    if ((padding >> (i / kPieces % kBlock) & 1) == 0) continue;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(x + i * 16), "r"(0) : "memory");
  }
  publish_shared_memory();
  sync_math<Tile::kSumThreads>();
}

/// A warpgroup's sums of grad_gate: 64 experts x 128 columns.
template <typename Tile>
struct GateSums {
  float sums[Tile::kColumns / 2] = {};    // of the current block of tokens
  float totals[Tile::kColumns / 2] = {};  // of the blocks before it

  /// Tokens ascending, for each the smallest parts first.
  __device__ __forceinline__ void multiply(SharedAddress parts, SharedAddress x) {
    using Operand = ops::hopper::WgmmaOperand<true>;
    ops::hopper::begin_products();
#pragma unroll
    for (int step = 0; step < Tile::kTokens / 16; ++step) {
      const uint64_t b = Operand::descriptor(x) + step * Operand::kPart;
#pragma unroll
      for (int part = 0; part < kNumParts; ++part) {
        const uint64_t a = Operand::descriptor(parts + part * kBlockBytes) + step * Operand::kPart;
        ops::hopper::Wgmma<BF16, Tile::kColumns>::template multiply<true, true>(sums, a, b, true);
      }
    }
    ops::hopper::commit_products();
  }

  // REQUIRES: no product is pending.
  __device__ __forceinline__ void end_block(bool is_first) {
    ops::hopper::settle(sums);
#pragma unroll
    for (int n = 0; n < Tile::kColumns / 2; ++n) {
      totals[n] = is_first ? sums[n] : totals[n] + sums[n];
      sums[n] = 0.0f;
    }
  }

  __device__ void store(const GradientsArgs& args, int first_column, int first_expert) const {
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float* const out = args.grad_gate + blockIdx.y * args.E * args.D;
    const bool is_aligned = reinterpret_cast<uintptr_t>(out) % sizeof(float2) == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t expert = first_expert + warp * 16 + half * 8 + lane / 4;
      if (expert >= args.E) break;
#pragma unroll
      for (int j = 0; j < Tile::kColumns / 8; ++j) {
        const int64_t column = first_column + j * 8 + lane % 4 * 2;
        if (column >= args.D) break;
        float* const to = out + expert * args.D + column;
        const float first = totals[4 * j + 2 * half];
        const float second = totals[4 * j + 2 * half + 1];
        if (is_aligned && !args.accumulates_gate) {
          *reinterpret_cast<float2*>(to) = make_float2(first, second);
        } else {
          to[0] = args.accumulates_gate ? to[0] + first : first;
          to[1] = args.accumulates_gate ? to[1] + second : second;
        }
      }
    }
  }
};

/// grad_gate of 64 experts, by a warpgroup: blocks of kGemmBlockK tokens in ascending order.
template <typename Tile>
__device__ void sum_grad_gate(const GradientsArgs& args, const GradPart<Tile>& part,
                              GradBarriers<Tile>& barriers) {
  const int group = static_cast<int>(threadIdx.x) / 128;
  GateSums<Tile> own;
  Padding padding(args.sequences, part.token, part.end_token);
  SlotPlace parts{Tile::kPartsSlots};
  SlotPlace x{Tile::kRowsSlots};
  for (int first = part.token; first < part.end_token; first += ops::kGemmBlockK) {
    const int end = min(first + static_cast<int>(ops::kGemmBlockK), part.end_token);
    int previous_parts = -1;
    int previous_x = -1;
    for (int token = first; token < end; token += Tile::kTokens) {
      const uint64_t bits = padding.next();
      ops::hopper::wait(barriers.x.full[x.slot], x.parity);
      if (bits != 0) zero_padding<Tile>(bits, part.x(x.slot));
      ops::hopper::wait(barriers.parts.full[parts.slot], parts.parity);
      own.multiply(part.parts(parts.slot) + group * kNumParts * kBlockBytes, part.x(x.slot));
      if (token > first) {
        ops::hopper::wait_for_products<1>();
        barriers.x.release(previous_x);
        barriers.release_parts(previous_parts);
      }
      previous_parts = parts.slot;
      previous_x = x.slot;
      parts.advance();
      x.advance();
    }
    ops::hopper::wait_for_products<0>();
    own.end_block(first == part.token);
    barriers.x.release(previous_x);
    barriers.release_parts(previous_parts);
  }
  own.store(args, part.column, group * kBlock);
}

}  // namespace crossdock::router::hopper
