#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/tensor_memory.hpp"
#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/operands.hpp"
#include "ops/cuda/hopper/tile_shape.hpp"

// Kernels for sm_90a, with much shared memory.

namespace crossdock::router::hopper {

/// Loads a kernel onto the current device. False if it was not compiled for it, and so has no body,
/// which declares shared memory.
template <typename... Params>
bool load_kernel(void (*kernel)(Params...), int64_t shared_bytes) {
  cuda::load_kernels(kernel);
  cudaFuncAttributes attributes{};
  CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.sharedSizeBytes == 0) return false;
  CROSSDOCK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared_bytes)));
  return true;
}

struct ClusterShape {
  int cluster_size;  // blocks, which are neighbours across
  int64_t across;    // blocks; rounded up to whole clusters
  int64_t down;
  int threads;
  int64_t shared_bytes;
};

/// As cuda::launch_early.
template <typename... Params>
void launch_clusters(void (*kernel)(Params...), const ClusterShape& shape, cudaStream_t stream,
                     const Params&... args) {
  const auto size = static_cast<unsigned>(shape.cluster_size);
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {size, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(round_up(shape.across, int64_t{size})),
                        static_cast<unsigned>(shape.down));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = attributes.size();
  CROSSDOCK_CUDA(cudaLaunchKernelEx(&config, kernel, args...));
}

// Rows of a matrix in blocks of 64 columns, [block][row][64] in shared memory. The copy engine
// takes its time for every box, so that all blocks are one box if the width of the matrix allows
// it.

/// num_blocks blocks of num_rows rows at a time.
struct ColumnBoxes {
  int num_rows = 0;
  int num_blocks = 0;
  bool is_one = false;  // all blocks are one box; else each is

  static ColumnBoxes of(int64_t width, int num_rows, int num_blocks) {
    return {num_rows, num_blocks, width % ops::hopper::kBlock == 0};
  }

  __host__ __device__ int block_bytes() const { return num_rows * 128; }

  ops::hopper::TensorMapSpec spec(const void* data, DType dtype, int64_t width,
                                  int64_t all_rows) const {
    constexpr uint64_t kColumns = ops::hopper::kBlock;
    const auto columns = static_cast<uint64_t>(width);
    const uint64_t inner = is_one ? kColumns : columns;
    return {.data = data,
            .dtype = dtype,
            .rank = 3,
            .sizes = {inner, static_cast<uint64_t>(all_rows), columns / inner},
            .strides = {columns * 2, inner * 2},
            .box = {kColumns, static_cast<uint32_t>(num_rows),
                    is_one ? static_cast<uint32_t>(num_blocks) : 1}};
  }

#if defined(__CUDACC__)
  /// Loads the blocks from `column` on. Those outside the matrix become zero, and count as bytes.
  __device__ void load(const CUtensorMap* map, const ops::hopper::BoxTarget& to, int column,
                       int row) const {
    if (is_one) return ops::hopper::load_box(map, to, 0, row, column / ops::hopper::kBlock);
    for (int block = 0; block < num_blocks; ++block) {
      ops::hopper::load_box(
          map, {to.address + static_cast<uint32_t>(block * block_bytes()), to.barrier, to.to_both},
          column + block * ops::hopper::kBlock, row, 0);
    }
  }

  /// Stores them; what is outside the matrix is left out.
  __device__ void store(const CUtensorMap* map, ops::hopper::SharedAddress from, int column,
                        int row) const {
    if (is_one) return ops::hopper::store_box(map, from, 0, row, column / ops::hopper::kBlock);
    for (int block = 0; block < num_blocks; ++block) {
      ops::hopper::store_box(map, from + static_cast<uint32_t>(block * block_bytes()),
                             column + block * ops::hopper::kBlock, row, 0);
    }
  }
#endif
};

// A ring of slots in shared memory, which the copy engine fills and warps that multiply empty. The
// two blocks of a cluster share an operand: each loads half of it for both. For code that is
// compiled for sm_90a only.

inline constexpr int kClusterSize = ops::hopper::kClusterSize;
inline constexpr int kMostSlots = 16;
inline constexpr int kSlotAlignment = 1024;  // the copy engine swizzles slots

/// The barriers of a block's slots. Every warp that waits for a full slot also arrives when it has
/// finished: none can fall a round behind.
struct SlotBarriers {
  uint64_t full[kMostSlots];
  uint64_t empty[kMostSlots];

  /// By one thread. A slot is free after `arrivals` arrivals.
  __device__ void init(int num_slots, int arrivals) {
    for (int slot = 0; slot < num_slots; ++slot) {
      ops::hopper::init_barrier(full[slot], 1);
      ops::hopper::init_barrier(empty[slot], arrivals);
    }
    ops::hopper::publish_barriers();
  }

  /// By a whole warp: it has finished with the slot.
  __device__ void release(int slot) {
    if (threadIdx.x % 32 == 0) ops::hopper::arrive(empty[slot]);
  }
  /// The same for a slot that both blocks of the cluster fill.
  __device__ void release_in_both(int slot) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kClusterSize) ops::hopper::arrive_at(empty[slot], lane);
  }
};

/// A place in the ring, and the parity of the phase that fills it.
struct SlotPlace {
  int num_slots;
  int slot = 0;
  int parity = 0;

  __device__ void advance() {
    if (++slot == num_slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

/// The first slot in a block's dynamic shared memory.
__device__ inline std::byte* first_slot(std::byte* memory) {
  const uint32_t offset = ops::hopper::shared_address(memory) % kSlotAlignment;
  return memory + (kSlotAlignment - offset) % kSlotAlignment;
}

/// Waits for the first num_threads threads of the block, those that multiply.
template <int num_threads>
__device__ void sync_math() {
  asm volatile("bar.sync 1, %0;" ::"n"(num_threads) : "memory");
}

/// Makes what this thread wrote to shared memory visible to the copy engine and the tensor cores.
__device__ inline void publish_shared_memory() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace crossdock::router::hopper
