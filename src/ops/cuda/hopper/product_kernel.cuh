#pragma once

#include <cstddef>
#include <cstdint>

#include "core/cuda/launch.hpp"
#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/epilogues.cuh"
#include "ops/cuda/hopper/load_tiles.cuh"
#include "ops/cuda/hopper/multiply_tiles.cuh"
#include "ops/cuda/hopper/product.cuh"
#include "ops/cuda/hopper/work_queue.cuh"
#include "ops/cuda/unused_rows.cuh"

// The kernel of all grouped products. Persistent clusters of two blocks draw work units, a pair of
// tiles each, from a counter in global memory. In a block, five roles run at the same time:
//
//   scheduler, one warp      draws units (work_queue.cuh) and finds their tiles (work_units.cuh)
//   loader, one thread       loads the operands of a tile step by step into a ring of slots,
//                            its own and those shared with the other block (load_tiles.cuh)
//   two math warpgroups      multiply (multiply_tiles.cuh) and store (epilogues.cuh)
//   two warps                zero the rows of the output that belong to no expert
//
// A 64-row block that lies outside its segment is neither loaded nor multiplied.

namespace crossdock::ops::hopper {

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

}  // namespace crossdock::ops::hopper
