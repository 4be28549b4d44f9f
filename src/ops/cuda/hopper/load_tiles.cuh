#pragma once

#include <cstdint>

#include "ops/cuda/hopper/product.cuh"
#include "ops/cuda/hopper/tma.cuh"
#include "ops/cuda/hopper/work_queue.cuh"

namespace crossdock::ops::hopper {

/// The loader requests its next unit when this many steps of the current one are left to load:
/// enough to hide the time that drawing a unit takes.
inline constexpr int kStepsAhead = 8;

/// What the loader needs to load one step of a unit into a slot.
struct StepTarget {
  const OperandMaps* maps;
  SharedAddress a;
  SharedAddress b;
  SharedAddress full;
  int depth;  // first index along the inner dimension
  int rank;
};

/// Loads one box of A, from the tile's 64-row block `block` on.
template <typename Product>
__device__ void load_a_box(const CUtensorMap* map, const WorkUnit& unit, const StepTarget& to,
                           bool is_whole, int block, bool to_both) {
  const BoxTarget box{to.a + block * kBlockBytes, to.full, to_both};
  if constexpr (Product::kATransposed) {
    const int column = unit.a_row + block * kBlock;
    load_box(map, box, is_whole ? 0 : column, to.depth, is_whole ? column / kBlock : 0);
  } else {
    load_box(map, box, to.depth, unit.a_row + block * kBlock);
  }
}

/// Loads the rows of A: all of them, or every other block for both blocks of the cluster.
template <typename Product>
__device__ void load_a(const WorkUnit& unit, const StepTarget& to, bool is_whole, int num_blocks) {
  constexpr int kRowBlocks = Product::Shape::kRowBlocks;
  const bool is_shared = unit.share_columns == 0;
  const bool large_boxes = num_blocks == kRowBlocks && (is_whole || !Product::kATransposed) &&
                           (!is_shared || kRowBlocks == 4);
  if (large_boxes) {
    const CUtensorMap* map = &to.maps->a_large;
    if (is_shared) {
      load_a_box<Product>(map, unit, to, is_whole, 2 * to.rank, true);
    } else {
#pragma unroll
      for (int block = 0; block < kRowBlocks; block += 2) {
        load_a_box<Product>(map, unit, to, is_whole, block, false);
      }
    }
    return;
  }
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    if (block < num_blocks && (!is_shared || block % 2 == to.rank)) {
      load_a_box<Product>(&to.maps->a_small, unit, to, is_whole, block, is_shared);
    }
  }
}

/// Loads one box of B, from column `column` of the tile on, a multiple of 64 or half a tile.
template <typename Product>
__device__ void load_b_box(const CUtensorMap* map, const WorkUnit& unit, const StepTarget& to,
                           bool is_whole, int column, bool to_both) {
  const BoxTarget box{to.b + column * 128, to.full, to_both};
  const int first = unit.column_tile * Product::Shape::kColumns + column;
  if constexpr (Product::kIsGated) {
    load_box(map, box, to.depth, 0, 0, first / 16, unit.expert);
  } else if constexpr (Product::kOperation == Operation::kForward) {
    load_box(map, box, to.depth, first, unit.expert);
  } else if constexpr (Product::kOperation == Operation::kDx) {
    load_box(map, box, is_whole ? 0 : first, to.depth, is_whole ? first / kBlock : 0, unit.expert);
  } else {
    load_box(map, box, is_whole ? 0 : first, to.depth, is_whole ? first / kBlock : 0);
  }
}

/// Loads the columns of B: all of them, or half of them for both blocks of the cluster.
template <typename Product>
__device__ void load_b(const WorkUnit& unit, const StepTarget& to, bool is_whole) {
  using Shape = typename Product::Shape;
  const bool is_shared = unit.share_columns != 0;
  const bool large_boxes = is_whole || !Product::kBTransposed;
  constexpr bool kHasHalves = !Product::kBTransposed || Shape::kColumnBlocks % 2 == 0;
  if (large_boxes && !is_shared) {
    load_b_box<Product>(&to.maps->b_large, unit, to, is_whole, 0, false);
  } else if (large_boxes && kHasHalves) {
    load_b_box<Product>(&to.maps->b_small, unit, to, is_whole, to.rank * (Shape::kColumns / 2),
                        true);
  } else if constexpr (Product::kBTransposed) {  // b_small is one block
#pragma unroll
    for (int block = 0; block < Shape::kColumnBlocks; ++block) {
      if (!is_shared || block % 2 == to.rank) {
        load_b_box<Product>(&to.maps->b_small, unit, to, is_whole, block * kBlock, is_shared);
      }
    }
  }
}

/// The loader: loads the operands of all units of this block. Called by one thread.
template <typename Product>
__device__ void load_tiles(const OperandMaps& maps, const ProductParams& params, WorkQueue& queue,
                           SlotBarriers<typename Product::Shape>& barriers,
                           const TileMemory<typename Product::Shape>& memory, int rank) {
  using Shape = typename Product::Shape;
  constexpr bool kIsDw = Product::kOperation == Operation::kDw;
  WorkQueue::Place next;
  RingPlace<Shape::kSlots> ring;
  int acquired_expert = -1;
  for (WorkUnit unit = queue.take(next); unit.num_steps != kNoMoreWork; unit = queue.take(next)) {
    const OperandMaps* const unit_maps = kIsDw ? params.expert_maps + unit.expert : &maps;
    if (kIsDw && acquired_expert != unit.expert) {
      acquired_expert = unit.expert;
      acquire_map(&unit_maps->a_small);
      acquire_map(&unit_maps->a_large);
      acquire_map(&unit_maps->b_small);
      acquire_map(&unit_maps->b_large);
    }
    // dW loads whole tiles: elements outside the tensor also count as bytes.
    const int num_blocks = kIsDw ? Shape::kRowBlocks : unit.row_blocks;
    const int request_step = max(0, unit.num_steps - kStepsAhead);
    if (rank == 0 && request_step == 0) arrive(queue.request);
    for (int step = 0; step < unit.num_steps; ++step) {
      if (rank == 0 && step == request_step && step > 0) arrive(queue.request);
      wait(barriers.empty[ring.slot], ring.parity ^ 1);
      arrive_and_expect(barriers.full[ring.slot], num_blocks * kBlockBytes + Shape::kBBytes);
      const StepTarget to{unit_maps,           memory.a(ring.slot),
                          memory.b(ring.slot), shared_address(&barriers.full[ring.slot]),
                          step * kDepth,       rank};
      load_a<Product>(unit, to, params.whole_a_blocks, num_blocks);
      load_b<Product>(unit, to, params.whole_b_blocks);
      ring.advance();
    }
  }
}

}  // namespace crossdock::ops::hopper
