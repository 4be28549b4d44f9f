#pragma once

#include <cuda.h>

#include <cstdint>

// Barriers in shared memory (mbarrier), the barrier of a cluster, and the named barriers of a
// block. For code that is compiled for sm_90a only.

namespace crossdock::ops::hopper {

/// An address in this block's shared memory. arrive_at and multicast loads reach the same offset in
/// the other block of the cluster.
using SharedAddress = uint32_t;

__device__ inline SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

/// A phase of the barrier completes after `arrivals` arrivals and the bytes that were announced.
__device__ inline void init_barrier(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals));
}

/// Call after the last init_barrier, before the other block and the copy engine use the barriers.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

/// Arrives, and makes the phase wait for num_bytes that the copy engine will write.
__device__ inline void arrive_and_expect(uint64_t& barrier, int num_bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(num_bytes)
      : "memory");
}

/// Arrives at this barrier of block `rank` of the cluster. Releases to its own block only, which
/// is enough for slots that the copy engine refills; a release to the cluster would be a full
/// memory barrier in every step.
__device__ inline void arrive_at(uint64_t& barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

/// Stores `value` to `word` of block `rank`, then arrives at its barrier: a thread that waits for
/// the barrier with wait_for_cluster sees the value.
__device__ inline void send_word(int32_t& word, uint64_t& barrier, int32_t value, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 word_there, barrier_there;\n"
      "mapa.shared::cluster.u32 word_there, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier_there, %1, %3;\n"
      "st.shared::cluster.u32 [word_there], %2;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [barrier_there];\n"
      "}" ::"r"(shared_address(&word)),
      "r"(shared_address(&barrier)), "r"(value), "r"(rank)
      : "memory");
}

/// Waits until the phase with this parity has completed: the first phase has parity 0, so parity 1
/// of a new barrier does not wait.
///
/// A waiter must not miss a phase: if the barrier completes the next one too, the parity looks as
/// if the awaited phase were still to come, and the wait never ends. So whoever waits also arrives
/// somewhere before that next phase can complete.
__device__ inline void wait(uint64_t& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ended;\n"
      "bra again;\n"
      "ended:\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

/// Like wait, for data that the other block of the cluster sent.
__device__ inline void wait_for_cluster(uint64_t& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ended;\n"
      "bra again;\n"
      "ended:\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

/// The rank of this block in its cluster.
__device__ inline int cluster_rank() {
  uint32_t rank = 0;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// Waits for all threads of the cluster.
__device__ inline void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// A place in a ring of kSize slots, and the parity of the phase that fills it.
template <int kSize>
struct RingPlace {
  int slot = 0;
  int parity = 0;

  __device__ void advance() {
    if (++slot == kSize) {
      slot = 0;
      parity ^= 1;
    }
  }
  __device__ void skip(int count) {
    slot += count;
    parity ^= (slot / kSize) & 1;
    slot %= kSize;
  }
};

// Boxes of a tensor loaded and stored by the copy engine (TMA). For code that is compiled for
// sm_90a only.

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
