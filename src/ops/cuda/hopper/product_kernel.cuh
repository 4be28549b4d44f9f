#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/epilogues.cuh"
#include "ops/cuda/hopper/operands.hpp"
#include "ops/cuda/hopper/product.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "ops/cuda/unused_rows.cuh"

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

// The kernel of all grouped products. Persistent clusters of two blocks draw work units, a pair of
// tiles each, from a counter in global memory. In a block, five roles run at the same time:
//
//   scheduler, one warp      draws units (WorkQueue) and finds their tiles (product.cuh)
//   loader, one thread       loads the operands of a tile step by step into a ring of slots,
//                            its own and those shared with the other block
//   two math warpgroups      multiply and store (epilogues.cuh)
//   two warps                zero the rows of the output that belong to no expert
//
// A 64-row block that lies outside its segment is neither loaded nor multiplied.

// A block computes tiles until there are none left; a thread has one of the roles above.
template <typename Product>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ OperandMaps maps,
                   const __grid_constant__ ProductParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = typename Product::Shape;
  extern __shared__ std::byte dynamic_memory[];
  __shared__ WorkQueue queue;
  __shared__ SlotBarriers<Shape> barriers;
  const TileMemory<Shape> memory(dynamic_memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = __shfl_sync(~0u, thread / 32, 0);  // shows the compiler that all lanes agree
  const int rank = cluster_rank();
  if (thread == 0) {
    queue.init();
    barriers.init();
    publish_barriers();
  }
  __syncthreads();
  sync_cluster();
  if constexpr (Product::kOperation == Operation::kDw) cuda::wait_for_previous_kernel();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kLoadRegisters));
    if (thread == 0) {
      load_tiles<Product>(maps, params, queue, barriers, memory, rank);
    } else if (warp == 1) {
      schedule<Product>(params, queue, rank);
    } else if (warp >= 2) {
      constexpr int kZeroThreads = 64;
      zero_unused_rows<uint4>(params.unused, {.index = static_cast<int>(blockIdx.x),
                                              .num_workers = static_cast<int>(gridDim.x),
                                              .thread = thread % kZeroThreads,
                                              .num_threads = kZeroThreads});
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kMathRegisters));
    multiply_tiles<Product>(params, queue, barriers, memory, warp - 4);
  }
  sync_cluster();  // the other block may still arrive at the barriers of this one
#endif
}

/// Loads a kernel onto the current device. False if it was not compiled for sm_90a: it then has no
/// body, and thus no barriers in shared memory.
template <typename Product>
bool load_product() {
  const auto kernel = product_kernel<Product>;
  cuda::load_kernels(kernel);
  CROSSDOCK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      Product::Shape::kSharedBytes));
  cudaFuncAttributes attributes{};
  CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.sharedSizeBytes > 0;
}

/// Launches as many clusters as fit on the SMs. may_start_early: see cuda::launch_early.
template <typename Product>
void launch_kernel(const OperandMaps& maps, const ProductParams& params,
                   const LaunchContext& context, bool may_start_early) {
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kClusterSize, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const int num_clusters = std::max(1, context.num_sms / kClusterSize);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_clusters * kClusterSize));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Product::Shape::kSharedBytes;
  config.stream = context.stream;
  config.attrs = attributes.data();
  config.numAttrs = may_start_early ? 2 : 1;
  CROSSDOCK_CUDA(cudaLaunchKernelEx(&config, product_kernel<Product>, maps, params));
}

/// The parameters that all products have.
inline ProductParams make_params(const ProductSizes& sizes, const Segments& segments,
                                 const TensorView& out, const LaunchContext& context) {
  ProductParams params{};
  params.starts = segments.starts;
  params.counts = segments.counts;
  params.num_experts = static_cast<int>(sizes.E_local);
  params.N = static_cast<int>(sizes.N);
  params.K = static_cast<int>(sizes.K);
  params.out = out.data;
  params.counters = context.counters;
  return params;
}

inline UnusedRows unused_rows_of(const Segments& segments, const TensorView& out) {
  return {.starts = segments.starts,
          .counts = segments.counts,
          .num_experts = static_cast<int>(segments.num_segments),
          .R = out.num_rows(),
          .rows = static_cast<std::byte*>(out.data),
          .row_bytes = out.row_bytes()};
}

/// Calls work with a BF16 or F16, for a template argument.
template <typename Work>
void with_element(DType dtype, const Work& work) {
  if (dtype == DType::kBF16) {
    work(BF16{});
  } else {
    work(F16{});
  }
}

}  // namespace crossdock::ops::hopper
