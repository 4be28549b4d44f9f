#pragma once

#include <cstdint>

#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/product.cuh"

// How the roles of a block learn what to do next.

namespace crossdock::ops::hopper {

/// A block's next work units. The scheduler of block 0 of a cluster draws a number and sends it to
/// block 1; the scheduler of each block writes what its own block has to do. Numbers are drawn as
/// late as the loader allows, so that the last units go to clusters that are about to be idle.
struct WorkQueue {
  static constexpr int kLength = 4;

  /// A place in the queue: a RingPlace in one register.
  struct Place {
    int round = 0;
    __device__ int slot() const { return round % kLength; }
    __device__ int parity() const { return round / kLength % 2; }
  };

  uint64_t full[kLength];         // a unit has been written
  uint64_t empty[kLength];        // loader and math warps have read it
  uint64_t drawn_full[kLength];   // block 1: a number has arrived
  uint64_t drawn_empty[kLength];  // block 0: block 1 has read it
  uint64_t request;               // block 0: the loader wants another unit
  WorkUnit units[kLength];
  int32_t drawn[kLength];  // block 1

  __device__ void init() {
    for (int i = 0; i < kLength; ++i) {
      init_barrier(full[i], 1);
      init_barrier(empty[i], 1 + kMathWarps);
      init_barrier(drawn_full[i], 1);
      init_barrier(drawn_empty[i], 1);
    }
    init_barrier(request, 1);
  }

  /// The next unit, for the loader.
  __device__ WorkUnit take(Place& place) {
    wait(full[place.slot()], place.parity());
    const WorkUnit unit = units[place.slot()];
    arrive(empty[place.slot()]);
    ++place.round;
    return unit;
  }

  /// The next unit, for a math warp.
  __device__ WorkUnit take(Place& place, int lane) {
    wait(full[place.slot()], place.parity());
    const WorkUnit unit = units[place.slot()];
    __syncwarp();
    if (lane == 0) arrive(empty[place.slot()]);
    ++place.round;
    return unit;
  }
};

/// Draws a number, the same in both blocks of the cluster. Called by a whole warp.
__device__ inline int draw_unit(const ProductParams& params, WorkQueue& queue,
                                const WorkQueue::Place& place, int rank, int lane) {
  const int slot = place.slot();
  if (rank == 0) {
    if (place.round > 0) wait(queue.request, (place.round - 1) % 2);
    wait(queue.drawn_empty[slot], place.parity() ^ 1);
    __syncwarp();  // all lanes have waited before one releases others
    int number = 0;
    if (lane == 0) {
      number = atomicAdd(params.counters, 1);
      send_word(queue.drawn[slot], queue.drawn_full[slot], number, 1);
    }
    return __shfl_sync(~0u, number, 0);
  }
  wait_for_cluster(queue.drawn_full[slot], place.parity());
  const int number = queue.drawn[slot];
  __syncwarp();
  if (lane == 0) arrive_at(queue.drawn_empty[slot], 0);
  return number;
}

/// The scheduler: fills the queue until there is no work left. Called by a whole warp.
template <typename Product>
__device__ void schedule(const ProductParams& params, WorkQueue& queue, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto units = Product::units(params);
  WorkQueue::Place place;
  bool is_found = true;
  for (; is_found; ++place.round) {
    const int number = draw_unit(params, queue, place, rank, lane);
    WorkUnit unit{};
    unit.num_steps = kNoMoreWork;
    is_found = units.find(number, rank, unit);
    wait(queue.empty[place.slot()], place.parity() ^ 1);
    __syncwarp();
    if (lane == 0) {
      queue.units[place.slot()] = unit;
      arrive(queue.full[place.slot()]);
    }
  }
  // The last cluster leaves the counters as it found them, for the next kernel.
  if (rank == 0 && lane == 0) {
    const int num_clusters = static_cast<int>(gridDim.x) / kClusterSize;
    if (atomicAdd(params.counters + 1, 1) == num_clusters - 1) {
      params.counters[0] = 0;
      params.counters[1] = 0;
    }
  }
}

}  // namespace crossdock::ops::hopper
