#pragma once

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

}  // namespace crossdock::ops::hopper
