#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/tile_shape.hpp"

// A ring of slots in shared memory, which the copy engine fills and warps that multiply empty. The
// two blocks of a cluster share an operand: each loads half of it for both. For code that is
// compiled for sm_90a only.

namespace crossdock::router::hopper {

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
