#pragma once

#include <cuda.h>

#include <cstdint>

#include "ops/cuda/hopper/barriers.cuh"

// Boxes of a tensor loaded and stored by the copy engine (TMA). For code that is compiled for
// sm_90a only.

namespace crossdock::ops::hopper {

/// Where a box goes: an address in shared memory, and the barrier that counts its bytes. With
/// to_both, box and bytes reach both blocks of the cluster, at the same places.
struct BoxTarget {
  SharedAddress address;
  SharedAddress barrier;
  bool to_both;
};

// Load the box of `map` whose first element has these coordinates, innermost first. Elements
// outside the tensor become zero, and count as bytes.

__device__ inline void load_box(const CUtensorMap* map, const BoxTarget& to, int x, int y) {
  if (to.to_both) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to.address),
        "l"(map), "r"(to.barrier), "h"(uint16_t{3}), "r"(x), "r"(y)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to.address),
        "l"(map), "r"(to.barrier), "r"(x), "r"(y)
        : "memory");
  }
}

__device__ inline void load_box(const CUtensorMap* map, const BoxTarget& to, int x, int y, int z) {
  if (to.to_both) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to.address),
        "l"(map), "r"(to.barrier), "h"(uint16_t{3}), "r"(x), "r"(y), "r"(z)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to.address),
        "l"(map), "r"(to.barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
  }
}

__device__ inline void load_box(const CUtensorMap* map, const BoxTarget& to, int x, int y, int z,
                                int u) {
  if (to.to_both) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to.address),
        "l"(map), "r"(to.barrier), "h"(uint16_t{3}), "r"(x), "r"(y), "r"(z), "r"(u)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to.address),
        "l"(map), "r"(to.barrier), "r"(x), "r"(y), "r"(z), "r"(u)
        : "memory");
  }
}

__device__ inline void load_box(const CUtensorMap* map, const BoxTarget& to, int x, int y, int z,
                                int u, int v) {
  if (to.to_both) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to.address),
        "l"(map), "r"(to.barrier), "h"(uint16_t{3}), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to.address),
        "l"(map), "r"(to.barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
        : "memory");
  }
}

/// Stores a box in shared memory to the tensor of `map`, whose first element has these coordinates,
/// innermost first; elements outside the tensor are skipped. Belongs to the next commit_stores.
__device__ inline void store_box(const CUtensorMap* map, SharedAddress from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until all stores of this thread have read their shared memory.
__device__ inline void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Starts reading a tensor map; otherwise the first load would wait for it.
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Makes a tensor map in global memory, written by an earlier kernel, usable by this thread's
/// loads.
__device__ inline void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

}  // namespace crossdock::ops::hopper
