#pragma once

#include "core/cuda/launch.hpp"
#include "ops/cuda/hopper/tma.cuh"
#include "router/cuda/hopper/grad_tile.cuh"

// The role of gradients_kernel that loads and stores. For code that is compiled for sm_90a only.

namespace crossdock::router::hopper {

using ops::hopper::BoxTarget;

/// Fills the ring of parts together with the other block, by one thread.
template <typename Tile>
__device__ void load_parts(const GradMaps& maps, const GradPart<Tile>& part,
                           SlotBarriers& barriers) {
  constexpr int kHalf = Tile::kTokens / kClusterSize;
  const int rank = ops::hopper::cluster_rank();
  SlotPlace ring{Tile::kPartsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], Tile::kPartsBytes);
#pragma unroll
    for (int i = 0; i < Tile::kGroups * kNumParts; ++i) {
      const SharedAddress to = part.parts(ring.slot) + i * kBlockBytes + rank * kHalf * 128;
      ops::hopper::load_box(&maps.parts, BoxTarget{to, full, true}, i / kNumParts * kBlock,
                            token + rank * kHalf, i % kNumParts);
    }
    ring.advance();
  }
}

/// Fills the ring of x, or that of grad_x, by one thread. Without `reads` slots get no values.
template <typename Tile>
__device__ void load_rows(const CUtensorMap* map, const GradPart<Tile>& part, SharedAddress slots,
                          SlotBarriers& barriers, bool reads) {
  SlotPlace ring{Tile::kRowsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], reads ? Tile::kRowsBytes : 0);
#pragma unroll
    for (int block = 0; reads && block < Tile::kColumnBlocks; ++block) {
      const SharedAddress to = slots + ring.slot * Tile::kRowsBytes + block * kBlockBytes;
      ops::hopper::load_box(map, BoxTarget{to, full, false}, part.column + block * kBlock, token);
    }
    ring.advance();
  }
}

template <typename Tile>
__device__ void load_gate(const GradMaps& maps, const GradPart<Tile>& part, uint64_t& has_gate) {
  const SharedAddress barrier = ops::hopper::shared_address(&has_gate);
  ops::hopper::arrive_and_expect(has_gate, Tile::kGateBytes);
#pragma unroll
  for (int i = 0; i < Tile::kGroups * Tile::kColumnBlocks; ++i) {
    ops::hopper::load_box(&maps.gate, BoxTarget{part.gate + i * kBlockBytes, barrier, false},
                          part.column + i % Tile::kColumnBlocks * kBlock,
                          i / Tile::kColumnBlocks * kBlock);
  }
}

/// Stores the results in the ring of grad_x, by one thread.
template <typename Tile>
__device__ void store_rows(const GradMaps& maps, const GradPart<Tile>& part,
                           GradBarriers<Tile>& barriers) {
  SlotPlace ring{Tile::kRowsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    ops::hopper::wait(barriers.is_computed[ring.slot], ring.parity);
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      ops::hopper::store_box(&maps.grad_x, part.grad_x(ring.slot) + block * kBlockBytes,
                             part.column + block * kBlock, token);
    }
    ops::hopper::commit_stores();
    ops::hopper::wait_until_stores_have_read();
    ops::hopper::arrive(barriers.grad_x.empty[ring.slot]);
    ring.advance();
  }
}

/// By one thread.
__device__ inline void prefetch_maps(const GradMaps& maps, const GradientsArgs& args) {
  ops::hopper::prefetch_map(&maps.parts);
  if (args.grad_gate != nullptr) ops::hopper::prefetch_map(&maps.x);
  if (!args.computes_x) return;
  ops::hopper::prefetch_map(&maps.gate);
  ops::hopper::prefetch_map(&maps.grad_x);
}

/// One warp of the fourth role.
template <typename Tile>
__device__ void copy_slots(const GradMaps& maps, const GradientsArgs& args,
                           const GradPart<Tile>& part, GradBarriers<Tile>& barriers) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  if (threadIdx.x % 32 != 0) return;
  if (warp == 0) {
    cuda::wait_for_previous_kernel();
    load_parts<Tile>(maps, part, barriers.parts);
  } else if (warp == 1 && args.grad_gate != nullptr) {
    load_rows<Tile>(&maps.x, part, part.x(0), barriers.x, true);
  } else if (warp == 2 && args.computes_x) {
    load_gate<Tile>(maps, part, barriers.has_gate);
    load_rows<Tile>(&maps.grad_x, part, part.grad_x(0), barriers.grad_x, args.accumulates_x);
  } else if (warp == 3 && args.computes_x) {
    cuda::wait_for_previous_kernel();
    store_rows<Tile>(maps, part, barriers);
  }
}

}  // namespace crossdock::router::hopper
