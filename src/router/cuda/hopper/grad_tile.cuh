#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "ops/cuda/hopper/barriers.cuh"
#include "router/cuda/hopper/clusters.cuh"
#include "router/cuda/hopper/gate_products.hpp"
#include "router/cuda/kernels.hpp"

// What the roles of gradients_kernel share: sizes, shared memory and barriers.

namespace crossdock::router::hopper {

using ops::hopper::kBlock;
using ops::hopper::kBlockBytes;
using ops::hopper::SharedAddress;

/// expert_groups * 64 experts, of which the product with the gate takes num_steps * 16.
template <int expert_groups, int num_steps>
struct GradTile {
  static constexpr int kGroups = expert_groups;
  static constexpr int kSteps = num_steps;
  static constexpr int kTokens = kBlock;   // at a time
  static constexpr int kColumnBlocks = 2;  // of 64 columns
  static constexpr int kColumns = kColumnBlocks * kBlock;
  static constexpr int kSumThreads = kGroups * 128;  // of the warpgroups for grad_gate
  static constexpr int kThreads = kSumThreads + 2 * 128;
  // Whether the blocks of a cluster share parts: each loads a group for both.
  static constexpr bool kShares = kGroups == kClusterSize;
  // Registers of a thread: for grad_gate, for grad_x, of those that load and store.
  static constexpr int kSumRegisters = kGroups == 2 ? 168 : 208;
  static constexpr int kXRegisters = kGroups == 2 ? 136 : 208;
  static constexpr int kCopyRegisters = 40;
  // Shared memory: the gate by group and column block, then the rings.
  static constexpr int kGateBytes = kGroups * kColumnBlocks * kBlockBytes;
  static constexpr int kPartsBytes = kGroups * kNumParts * kBlockBytes;  // by group and part
  static constexpr int kRowsBytes = kColumnBlocks * kBlockBytes;  // of x or grad_x, by column block
  static constexpr int kPartsSlots = kGroups == 2 ? 2 : 3;
  static constexpr int kRowsSlots = kGroups == 2 ? 3 : 4;
  static constexpr int kSharedBytes =
      kSlotAlignment + kGateBytes + kPartsSlots * kPartsBytes + 2 * kRowsSlots * kRowsBytes;
  static_assert(kSharedBytes <= kGradSharedBytes);
};

struct GradientsArgs {
  const int32_t* sequences;  // [T]; negative: padding
  int64_t T;
  int64_t E;
  int64_t D;
  TokenSlices slices;
  ColumnBoxes boxes;  // of x, grad_x and the gate
  bool computes_x;
  bool accumulates_x;
  float* grad_gate;  // out: [slices.count, E, D], a sum for each slice; null: not needed
  bool accumulates_gate;
};

struct GradMaps {
  CUtensorMap parts;  // boxes of 64 experts x 64 tokens x 3 parts
  CUtensorMap gate;   // GradientsArgs::boxes
  CUtensorMap x;
  CUtensorMap grad_x;
};

template <typename Tile>
struct GradBarriers {
  uint64_t has_gate;
  SlotBarriers parts;
  SlotBarriers x;
  SlotBarriers grad_x;
  uint64_t is_computed[Tile::kRowsSlots];  // results are in the slot of grad_x

  __device__ void init(const GradientsArgs& args) {
    const int sum_warps = args.grad_gate != nullptr ? Tile::kSumThreads / 32 : 0;
    const int x_warps = args.computes_x ? 4 : 0;
    ops::hopper::init_barrier(has_gate, 1);
    for (uint64_t& barrier : is_computed) ops::hopper::init_barrier(barrier, 4);
    parts.init(Tile::kPartsSlots, (Tile::kShares ? kClusterSize : 1) * (sum_warps + x_warps));
    x.init(Tile::kRowsSlots, Tile::kSumThreads / 32);
    grad_x.init(Tile::kRowsSlots, 1);
  }

  /// By a whole warp: it has finished with the slot.
  __device__ void release_parts(int slot) {
    if constexpr (Tile::kShares) {
      parts.release_in_both(slot);
    } else {
      parts.release(slot);
    }
  }
};

/// A block's part of the gradients, and its shared memory.
template <typename Tile>
struct GradPart {
  int column;     // the first one
  int token;      // likewise
  int end_token;  // of the slice
  SharedAddress gate;

  __device__ GradPart(const GradientsArgs& args, std::byte* memory)
      : column(static_cast<int>(blockIdx.x) * Tile::kColumns),
        token(static_cast<int>(blockIdx.y * args.slices.num_tokens)),
        end_token(static_cast<int>(min(token + args.slices.num_tokens, args.T))),
        gate(ops::hopper::shared_address(memory)) {}

  __device__ SharedAddress parts(int slot) const {
    return gate + Tile::kGateBytes + slot * Tile::kPartsBytes;
  }
  __device__ SharedAddress x(int slot) const {
    return parts(Tile::kPartsSlots) + slot * Tile::kRowsBytes;
  }
  __device__ SharedAddress grad_x(int slot) const { return x(Tile::kRowsSlots + slot); }
};

}  // namespace crossdock::router::hopper
