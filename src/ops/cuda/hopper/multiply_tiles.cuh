#pragma once

#include <cstdint>

#include "ops/cuda/hopper/epilogues.cuh"
#include "ops/cuda/hopper/product.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "ops/cuda/hopper/work_queue.cuh"

namespace crossdock::ops::hopper {

/// Makes two warpgroups take turns on the tensor cores. Group 0 begins.
template <bool kTakeTurns>
struct Turns {
  int group;

  __device__ void begin() const {
    if (kTakeTurns && group == 1) pass();
  }
  __device__ void wait_for_turn() const {
    if constexpr (kTakeTurns) {
      asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
    }
  }
  __device__ void pass() const {
    if constexpr (kTakeTurns) {
      asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
    }
  }
};

/// The state of a math warp.
template <typename ProductType>
struct MathWarp {
  using Product = ProductType;
  using Shape = typename Product::Shape;
  using Sums = float[Shape::kGroupBlocks][Shape::kColumns / 2];

  SlotBarriers<Shape>& barriers;
  const TileMemory<Shape>& memory;
  Turns<Shape::kTakeTurns> turns;
  int group;          // of the two warpgroups
  int warp_in_group;  // has 16 rows of each 64-row block, from 16 * warp_in_group on
  int lane;
  RingPlace<Shape::kSlots> ring{};

  /// The 64-row block of the tile that is the group's block `i`.
  __device__ int block_of(int i) const { return Shape::kTakeTurns ? i : 2 * i + group; }

  /// The group's blocks among the first `row_blocks` of a tile.
  __device__ int blocks_of_group(int row_blocks) const {
    return Shape::kTakeTurns ? row_blocks : (row_blocks + 1 - group) / 2;
  }

  /// The warp's rows in the group's block `i`.
  __device__ WarpRows rows_of(const WorkUnit& unit, int i) const {
    const int first = block_of(i) * kBlock + warp_in_group * 16;
    return {int64_t{unit.out_row} + first, unit.num_rows - first, unit.column_tile, unit.expert};
  }
};

/// Zeroes the group's rows of a tile: gradients of an expert without rows.
template <typename Warp>
__device__ void zero_rows(const Warp& warp, const WorkUnit& unit, int num_blocks,
                          const ProductParams& params, int out_columns) {
  using Shape = typename Warp::Shape;
  for (int i = 0; i < num_blocks; ++i) {
    zero_warp_rows<Shape::kColumns, Warp::Product::Epilogue::kOutBytes>(
        warp.rows_of(unit, i), params, out_columns, warp.lane);
  }
}

/// Multiplies the slot's step for kBlocks 64-row blocks; the first step overwrites the sums.
template <int kBlocks, typename Warp>
__device__ __forceinline__ void multiply_step(typename Warp::Sums& sums, const Warp& warp,
                                              uint64_t a, uint64_t b, bool is_first) {
  using Product = typename Warp::Product;
  using Shape = typename Warp::Shape;
  using A = WgmmaOperand<Product::kATransposed>;
  using B = WgmmaOperand<Product::kBTransposed>;
  constexpr int kBlockStride = (Shape::kTakeTurns ? 1 : 2) * kBlockBytes / 16;
  a += static_cast<uint64_t>(warp.ring.slot * (Shape::kABytes / 16));
  b += static_cast<uint64_t>(warp.ring.slot * (Shape::kBBytes / 16));
  begin_products();
#pragma unroll
  for (int part = 0; part < kDepth / 16; ++part) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      Wgmma<typename Product::Element, Shape::kColumns>::template multiply<Product::kATransposed,
                                                                           Product::kBTransposed>(
          sums[i], a + part * A::kPart + i * kBlockStride, b + part * B::kPart,
          !is_first || part > 0);
    }
  }
  commit_products();
}

/// Sums the products of all steps of a unit for kBlocks 64-row blocks, in ascending order. One step
/// is in flight while the next is issued.
template <int kBlocks, typename Warp>
__device__ __forceinline__ void multiply(typename Warp::Sums& sums, Warp& warp, int num_steps) {
  using Product = typename Warp::Product;
  auto& [slot, parity] = warp.ring;
  const uint64_t a = WgmmaOperand<Product::kATransposed>::descriptor(
      warp.memory.a(0) + warp.block_of(0) * kBlockBytes);
  const uint64_t b = WgmmaOperand<Product::kBTransposed>::descriptor(warp.memory.b(0));
  // The first step has its own code: with a condition in the loop, the assembler would wait after
  // each product.
  wait(warp.barriers.full[slot], parity);
  multiply_step<kBlocks>(sums, warp, a, b, true);
  int previous = slot;
  warp.ring.advance();
#pragma unroll 1
  for (int step = 1; step < num_steps; ++step) {
    wait(warp.barriers.full[slot], parity);
    multiply_step<kBlocks>(sums, warp, a, b, false);
    wait_for_products<1>();
    warp.barriers.release(previous, warp.lane);
    previous = slot;
    warp.ring.advance();
  }
  warp.turns.pass();
  wait_for_products<0>();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) settle(sums[i]);
  warp.barriers.release(previous, warp.lane);
}

/// Skips the steps of a unit, for a group that has no rows in it.
template <typename Warp>
__device__ void pass_by(Warp& warp, int num_steps) {
  for (int step = 0; step < num_steps; ++step) {
    wait(warp.barriers.full[warp.ring.slot], warp.ring.parity);
    __syncwarp();
    warp.barriers.release(warp.ring.slot, warp.lane);
    warp.ring.advance();
  }
}

/// The lane of this thread, read where it is used: otherwise the compiler would keep values
/// computed from it in registers from one tile to the next, and has none to spare.
__device__ inline int read_lane() {
  int lane = 0;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// A math warp: multiplies and stores the tiles of all units of this block, together with the other
/// warps of its group.
template <typename Product>
__device__ void multiply_tiles(const ProductParams& params, WorkQueue& queue,
                               SlotBarriers<typename Product::Shape>& barriers,
                               const TileMemory<typename Product::Shape>& memory, int math_warp) {
  using Shape = typename Product::Shape;
  using Epilogue = typename Product::Epilogue;
  constexpr bool kIsDw = Product::kOperation == Operation::kDw;
  static_assert(!kIsDw || !Shape::kTakeTurns);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = math_warp / 4;
  MathWarp<Product> warp{barriers, memory, {group}, group, math_warp % 4, lane};
  const int out_columns = Product::out_columns(params);
  const int column_tiles = divide_up(out_columns, Shape::kColumns);
  typename MathWarp<Product>::Sums sums;
  WorkQueue::Place next;
  warp.turns.begin();
  for (;;) {
    const bool is_own_turn = !Shape::kTakeTurns || next.round % 2 == group;
    const WorkUnit unit = queue.take(next, lane);
    if (unit.num_steps == kNoMoreWork) break;
    if (!is_own_turn) {
      warp.ring.skip(unit.num_steps);
      continue;
    }
    const int num_blocks =
        unit.column_tile < column_tiles ? warp.blocks_of_group(unit.row_blocks) : 0;
    if (kIsDw && unit.num_steps == 0) {
      if (Epilogue::kZeroesEmpty) zero_rows(warp, unit, num_blocks, params, out_columns);
      continue;
    }
    warp.turns.wait_for_turn();
    if (num_blocks == 0) {
      pass_by(warp, unit.num_steps);
      warp.turns.pass();
      continue;
    }
    if (Shape::kGroupBlocks == 1 || num_blocks == 1) {
      multiply<1>(sums, warp, unit.num_steps);
    } else {
      multiply<Shape::kGroupBlocks>(sums, warp, unit.num_steps);
    }
    const int own_lane = read_lane();
    WarpStage<Shape::kStageBuffers> stage(memory.stage(math_warp), own_lane);
#pragma unroll
    for (int i = 0; i < Shape::kGroupBlocks; ++i) {
      const WarpRows rows = warp.rows_of(unit, i);
      if (i >= num_blocks || rows.num_rows <= 0) break;
      Epilogue::store(sums[i], rows, stage, params, out_columns, own_lane);
    }
  }
}

}  // namespace crossdock::ops::hopper
