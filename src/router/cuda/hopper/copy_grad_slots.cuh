#pragma once

#include "core/cuda/launch.hpp"
#include "ops/cuda/hopper/tma.cuh"
#include "router/cuda/hopper/grad_tile.cuh"

// The role of gradients_kernel that loads and stores. For code that is compiled for sm_90a only.

namespace crossdock::router::hopper {

using ops::hopper::BoxTarget;

/// Fills the ring of parts, by one thread.
template <typename Tile>
__device__ void load_parts(const GradMaps& maps, const GradPart<Tile>& part,
                           SlotBarriers& barriers) {
  const int group = Tile::kShares ? ops::hopper::cluster_rank() : 0;
  SlotPlace ring{Tile::kPartsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    const SharedAddress to = part.parts(ring.slot) + group * kNumParts * kBlockBytes;
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], Tile::kPartsBytes);
    ops::hopper::load_box(&maps.parts, BoxTarget{to, full, Tile::kShares}, group * kBlock, token,
                          0);
    ring.advance();
  }
}

/// Fills the ring of x, or that of grad_x, by one thread. Without a map slots get no values.
template <typename Tile>
__device__ void load_rows(const CUtensorMap* map, const ColumnBoxes& boxes,
                          const GradPart<Tile>& part, SharedAddress slots, SlotBarriers& barriers) {
  SlotPlace ring{Tile::kRowsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    const SharedAddress to = slots + ring.slot * Tile::kRowsBytes;
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], map != nullptr ? Tile::kRowsBytes : 0);
    if (map != nullptr) boxes.load(map, BoxTarget{to, full, false}, part.column, token);
    ring.advance();
  }
}

template <typename Tile>
__device__ void load_gate(const GradMaps& maps, const ColumnBoxes& boxes,
                          const GradPart<Tile>& part, uint64_t& has_gate) {
  const SharedAddress barrier = ops::hopper::shared_address(&has_gate);
  ops::hopper::arrive_and_expect(has_gate, Tile::kGateBytes);
  for (int group = 0; group < Tile::kGroups; ++group) {
    const SharedAddress to = part.gate + group * Tile::kColumnBlocks * kBlockBytes;
    boxes.load(&maps.gate, BoxTarget{to, barrier, false}, part.column, group * kBlock);
  }
}

/// Stores the results in the ring of grad_x, by one thread.
template <typename Tile>
__device__ void store_rows(const GradMaps& maps, const ColumnBoxes& boxes,
                           const GradPart<Tile>& part, GradBarriers<Tile>& barriers) {
  SlotPlace ring{Tile::kRowsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    ops::hopper::wait(barriers.is_computed[ring.slot], ring.parity);
    boxes.store(&maps.grad_x, part.grad_x(ring.slot), part.column, token);
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
    load_rows<Tile>(&maps.x, args.boxes, part, part.x(0), barriers.x);
  } else if (warp == 2 && args.computes_x) {
    load_gate<Tile>(maps, args.boxes, part, barriers.has_gate);
    load_rows<Tile>(args.accumulates_x ? &maps.grad_x : nullptr, args.boxes, part, part.grad_x(0),
                    barriers.grad_x);
  } else if (warp == 3 && args.computes_x) {
    cuda::wait_for_previous_kernel();
    store_rows<Tile>(maps, args.boxes, part, barriers);
  }
}

}  // namespace crossdock::router::hopper
