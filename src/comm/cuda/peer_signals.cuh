#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

// What kernels that wait for other ranks report to their host: plain data.

namespace crossdock::cuda {

/// Why a wait or an exchange failed.
enum class FaultCode : uint32_t {
  kNone = 0,
  kTimeout,          // `culprit` did not arrive
  kPeerFailed,       // `culprit` had failed already
  kTooManyRoutes,    // more set bits in a token of a dense map than slots
  kExpertRange,      // an expert id outside [0, E) that is not -1
  kExpertRepeated,   // the same expert twice in a token
  kWeightNotFinite,  // a weight that is not finite
  kTooManyRows,      // more rows at `culprit` than max_rows
  kOtherCall,        // ranks have queued different calls, or one has refused its own
  kStopped,          // a peer has stopped, or is at another kind of call
};

/// A failure on the device. `code` is written last.
struct Fault {
  uint32_t code = 0;       // FaultCode
  int32_t culprit = 0;     // rank
  uint32_t operation = 0;  // Operation
  uint32_t epoch = 0;      // number of the wait in its channel
  int64_t route = 0;       // pack_route at the culprit; the rows needed (kTooManyRows); the number
                           // of this rank's call (kOtherCall)
  int64_t value = 0;       // the expert id, the bits of the weight, or the number of set bits
};

/// A token and a slot of it, or for kTooManyRoutes its number of slots.
inline constexpr int kSlotBits = 16;
__host__ __device__ inline int64_t pack_route(int64_t token, int32_t slot) {
  return token << kSlotBits | slot;
}
__host__ __device__ inline int64_t token_of(const Fault& fault) {
  return fault.route >> kSlotBits;
}
__host__ __device__ inline int64_t slot_of(const Fault& fault) {
  return fault.route & ((1 << kSlotBits) - 1);
}

/// Whether a fault ends its channel; other faults end one step.
__host__ __device__ inline bool is_fatal(const Fault& fault) {
  return fault.code == static_cast<uint32_t>(FaultCode::kTimeout) ||
         fault.code == static_cast<uint32_t>(FaultCode::kPeerFailed);
}

/// Faults that a rank's device reports to its host, in host memory: the first of each kind since
/// the host took the last one. Each kind has its own slot, so none is lost.
struct FaultBoard {
  Fault refused;  // ends one step
  Fault halted;   // ends all steps until the hosts have met
  Fault fatal;
  uint32_t abandon = 0;  // written by the host: end all waits. kAbandon, or kGone + the peer's rank

  static constexpr uint32_t kAbandon = 1;  // no peer will arrive
  static constexpr uint32_t kGone = 2;     // one peer's process has ended
};

// How ranks on GPUs wait for each other: words in each other's memory, with numbered epochs. Every
// wait ends: after the deadline the rank records which peer is missing, and its kernels do nothing.

/// Maximum number of ranks that reach each other's memory. One NVLink domain has up to 72.
inline constexpr int kMaxPeers = 72;

/// What a rank is waiting for; used in messages.
enum class Operation : uint32_t {
  kPlan,
  kDispatch,
  kCombine,
  kCombineUnweighted,
  kDispatchBackward,
  kCombineBackward,
  kRouteValues,
};

/// A rank's own words, in its device memory; used by one kernel at a time.
struct SignalState {
  uint32_t epoch = 0;         // of the last barrier or exchange
  uint32_t blocks_done = 0;   // of the running kernel
  uint32_t tokens_taken = 0;  // of the running scatter, by persistent blocks
  /// FaultCode that ended or halted this channel, or 0; if it has ended, the culprit's rank is
  /// above the code. Either way its kernels use no memory of peers. A rank whose channel has ended
  /// keeps telling its peers so (failure_of). A halted channel is halted on all ranks, at the same
  /// epoch: no rank signals or waits until the hosts have met and resume.
  uint32_t poison = 0;
  uint32_t fault_lock = 0;            // held while writing a fault for the host
  uint64_t bad_route = ~uint64_t{0};  // lowest (route << 8 | code) of the current plan; ~0: none

  static constexpr uint32_t kCodeBits = 8;  // of poison
};

/// Layout of the memory that peers write: one flag per rank; two records of queued calls per rank;
/// two inboxes of words per rank, and two of values. Epochs alternate between the two: a rank at
/// epoch n + 2 has seen every rank at n + 1, so all have read n. A word carries its epoch; values
/// are 64 bits wide and do not, so a barrier must follow them.
struct Mailbox {
  static constexpr auto kFlagBytes = static_cast<int64_t>(kMaxPeers * sizeof(uint64_t));
  static constexpr int64_t kRecordBytes = 64;  // see peer_calls.cuh
  /// In a record: this plus the failure (failure_of) of a rank whose channel has ended.
  static constexpr uint32_t kFailedRecord = ~0u - kMaxPeers - 1;
  static constexpr int64_t kWordsBegin = kFlagBytes + int64_t{2} * kMaxPeers * kRecordBytes;
  static constexpr int64_t kMaxValues = 2048;  // per rank and exchange

  static __host__ __device__ int64_t num_bytes(int P, int64_t max_words) {
    return value_offset(0, P, 2 * P, max_words);
  }
  static __host__ __device__ int64_t record_offset(uint32_t epoch, int source) {
    return kFlagBytes + ((epoch & 1) * kMaxPeers + source) * kRecordBytes;
  }
  static __host__ __device__ int64_t flag_offset(int source) {
    return source * static_cast<int64_t>(sizeof(uint64_t));
  }
  static __host__ __device__ int64_t word_offset(uint32_t epoch, int P, int source,
                                                 int64_t max_words) {
    return kWordsBegin +
           ((epoch & 1) * P + source) * max_words * static_cast<int64_t>(sizeof(uint64_t));
  }
  static __host__ __device__ int64_t value_offset(uint32_t epoch, int P, int source,
                                                  int64_t max_words) {
    return word_offset(0, P, 2 * P, max_words) +
           ((epoch & 1) * P + source) * kMaxValues * static_cast<int64_t>(sizeof(uint64_t));
  }
};

/// A channel as kernels see it, passed by value; owned by PeerChannel. With P = 0 or 1 a kernel
/// works for this rank alone and waits for no peer.
struct ShownMemory;
struct PeerSignals {
  int rank;
  int P;
  int64_t max_words;              // per rank and exchange
  int64_t deadline_ns;            // of one wait
  SignalState* state;             // own
  FaultBoard* faults;             // own, host memory
  ShownMemory* shown;             // own: what peers show in the current queued call
  std::byte* mailbox[kMaxPeers];  // of every rank; null for ranks it never waits for
};

#if defined(__CUDACC__)

__device__ inline uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint64_t load_relaxed(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void store_release(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void store_relaxed(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline uint64_t now_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

/// Counts attempts and says when to give up. Reads the clock every 64th time and, after a while,
/// also the host's request to abandon.
class Patience {
 public:
  __device__ explicit Patience(const PeerSignals& signals) : signals_(signals) {}

  __device__ bool is_over() {
    if ((++tries_ & 63u) != 0) return false;
    const uint64_t now = now_ns();
    if (begin_ == 0) begin_ = now;
    if (static_cast<int64_t>(now - begin_) > signals_.deadline_ns) return true;
    if (tries_ < kManyTries) return false;
    __nanosleep(200);
    return *static_cast<volatile uint32_t*>(&signals_.faults->abandon) != 0;
  }

  /// True every so often once the wait is long: the peer may be waiting for something else.
  __device__ bool should_look_around() const { return tries_ >= kManyTries && (tries_ & 63u) == 0; }

 private:
  static constexpr uint32_t kManyTries = 4096;

  const PeerSignals& signals_;
  uint64_t begin_ = 0;
  uint32_t tries_ = 0;
};

/// Writes the fault to a slot for the host, unless the host has not yet taken an earlier one.
/// Atomics do not work on host memory, so the lock is in device memory.
__device__ inline void record_fault(const PeerSignals& signals, volatile Fault* host,
                                    const Fault& fault) {
  while (atomicCAS(&signals.state->fault_lock, 0u, 1u) != 0u) __nanosleep(20);
  if (host->code == 0) {
    host->culprit = fault.culprit;
    host->operation = fault.operation;
    host->epoch = fault.epoch;
    host->route = fault.route;
    host->value = fault.value;
    __threadfence_system();
    host->code = fault.code;
    __threadfence_system();
  }
  atomicExch(&signals.state->fault_lock, 0u);
}

/// Ends the channel: later kernels of this rank use no memory of a peer except its mailbox, to tell
/// it.
__device__ inline void poison(const PeerSignals& signals, FaultCode code, int culprit,
                              Operation operation, uint32_t epoch) {
  record_fault(signals, &signals.faults->fatal,
               {.code = static_cast<uint32_t>(code),
                .culprit = culprit,
                .operation = static_cast<uint32_t>(operation),
                .epoch = epoch,
                .route = -1,
                .value = 0});
  const auto named = static_cast<uint32_t>(culprit) << SignalState::kCodeBits;
  atomicCAS(&signals.state->poison, 0u, named | static_cast<uint32_t>(code));
}

/// Sent when a channel has ended, so that every error names the rank that failed first, not the one
/// that reported it.
struct ChannelFailure {
  static constexpr uint32_t kFailed = 1;      // this rank
  static constexpr uint32_t kPeerFailed = 2;  // this plus the rank that had failed before
};
/// The failure of a channel with this SignalState::poison; 0 if it has not ended.
__device__ inline uint32_t failure_of(uint32_t poison) {
  const uint32_t code = poison & ((1u << SignalState::kCodeBits) - 1);
  if (code == static_cast<uint32_t>(FaultCode::kPeerFailed)) {
    return ChannelFailure::kPeerFailed + (poison >> SignalState::kCodeBits);
  }
  return code == static_cast<uint32_t>(FaultCode::kTimeout) ? ChannelFailure::kFailed : 0;
}

/// Ends the channel because rank `peer` has sent a failure.
__device__ inline void follow_failure(const PeerSignals& signals, int peer, uint32_t failure,
                                      Operation operation, uint32_t epoch) {
  const bool is_its_own = failure < ChannelFailure::kPeerFailed;
  const int culprit = is_its_own ? peer : static_cast<int>(failure - ChannelFailure::kPeerFailed);
  poison(signals, FaultCode::kPeerFailed, culprit, operation, epoch);
}

/// Halts the channel at fault.epoch, as all ranks do, and tells the host why.
__device__ inline void halt(const PeerSignals& signals, const Fault& fault) {
  record_fault(signals, &signals.faults->halted, fault);
  atomicCAS(&signals.state->poison, 0u, fault.code);
  __threadfence();  // a kernel that sees this epoch also sees that the channel is halted
  *static_cast<volatile uint32_t*>(&signals.state->epoch) = fault.epoch;
}

/// Ends a wait for rank `peer` that has lasted too long.
__device__ inline void give_up(const PeerSignals& signals, int peer, Operation operation,
                               uint32_t epoch) {
  const uint32_t abandon = *static_cast<volatile uint32_t*>(&signals.faults->abandon);
  if (abandon >= FaultBoard::kGone) {
    const auto gone = static_cast<int>(abandon - FaultBoard::kGone);
    poison(signals, FaultCode::kPeerFailed, gone, operation, epoch);
  } else {
    poison(signals, FaultCode::kTimeout, peer, operation, epoch);
  }
}

/// Whether the channel has ended or is halted. Kernels ask before they use a peer's memory, at the
/// point where they load its address, so that the check costs no extra time.
__device__ inline bool is_poisoned(const SignalState& state) {
  return *static_cast<const volatile uint32_t*>(&state.poison) != 0;
}
__device__ inline bool is_poisoned(const PeerSignals& signals) {
  return is_poisoned(*signals.state);
}

/// A channel as a kernel finds it.
struct SignalStart {
  uint32_t epoch;    // of the last barrier or exchange
  uint32_t failure;  // of a channel that has ended; else 0
  bool is_poisoned;  // the channel has ended or is halted
  bool is_halted;    // kernels neither signal nor wait
};

/// Loads both words before testing either, to pay for one memory latency instead of two.
__device__ inline SignalStart read_start(const PeerSignals& signals) {
  const auto* state = static_cast<const volatile SignalState*>(signals.state);
  const uint32_t epoch = state->epoch;
  const uint32_t poison = state->poison;
  const uint32_t failure = failure_of(poison);
  return {.epoch = epoch,
          .failure = failure,
          .is_poisoned = poison != 0,
          .is_halted = poison != 0 && failure == 0};
}

/// A word with its epoch in the low half.
__device__ inline uint64_t pack_word(uint32_t epoch, uint32_t value) {
  return static_cast<uint64_t>(value) << 32 | epoch;
}

/// Whether a word is of an epoch before this one.
__device__ inline bool is_before(uint64_t word, uint32_t epoch) {
  return static_cast<int32_t>(static_cast<uint32_t>(word) - epoch) < 0;
}

/// For a wait whose flag or words do not arrive: if rank `peer` is at a queued call of this epoch
/// instead (see peer_calls.cuh) or has stopped, halts the channel, as that rank does, and returns
/// true.
__device__ inline bool halts_instead(const PeerSignals& signals, int peer, Operation operation,
                                     uint32_t epoch) {
  const std::byte* record = signals.mailbox[signals.rank] + Mailbox::record_offset(epoch, peer);
  const uint64_t word = load_acquire(reinterpret_cast<const uint64_t*>(record));
  if (static_cast<uint32_t>(word) != epoch) return false;
  const auto value = static_cast<uint32_t>(word >> 32);
  if (value > Mailbox::kFailedRecord) {
    follow_failure(signals, peer, value - Mailbox::kFailedRecord, operation, epoch);
  } else {
    halt(signals, {.code = static_cast<uint32_t>(FaultCode::kStopped),
                   .culprit = peer,
                   .operation = static_cast<uint32_t>(operation),
                   .epoch = epoch,
                   .route = 0,
                   .value = 0});
  }
  return true;
}

/// Tells all ranks with a mailbox that this rank is at `epoch`, and its failure if its channel has
/// ended. Called by all threads of a block.
__device__ inline void send_flags(const PeerSignals& signals, uint32_t epoch, uint32_t failure) {
  for (int p = static_cast<int>(threadIdx.x); p < signals.P; p += static_cast<int>(blockDim.x)) {
    if (signals.mailbox[p] == nullptr) continue;
    auto* flag =
        reinterpret_cast<uint64_t*>(signals.mailbox[p] + Mailbox::flag_offset(signals.rank));
    store_release(flag, pack_word(epoch, failure));
  }
}

/// Waits until all ranks with a mailbox are at `epoch`. Called by all threads of a block.
__device__ inline void await_flags(const PeerSignals& signals, Operation operation,
                                   uint32_t epoch) {
  for (int p = static_cast<int>(threadIdx.x); p < signals.P; p += static_cast<int>(blockDim.x)) {
    if (signals.mailbox[p] == nullptr) continue;
    const auto* flag =
        reinterpret_cast<const uint64_t*>(signals.mailbox[signals.rank] + Mailbox::flag_offset(p));
    Patience patience(signals);
    uint64_t word = load_acquire(flag);
    while (is_before(word, epoch)) {
      const bool is_over = patience.is_over();
      word = load_acquire(flag);
      if (!is_before(word, epoch)) break;
      if (patience.should_look_around()) [[unlikely]] {
        if (halts_instead(signals, p, operation, epoch)) return;
      }
      if (is_over) [[unlikely]] {
        give_up(signals, p, operation, epoch);
        break;
      }
    }
    if (const auto failure = static_cast<uint32_t>(word >> 32); failure != 0) [[unlikely]] {
      follow_failure(signals, p, failure, operation, epoch);
    }
  }
}

/// Waits until all ranks with a mailbox have arrived; what they wrote before is then visible. Ranks
/// must execute equally many barriers, even if they wait for different peers. Called by all threads
/// of one block per rank, the last block of its kernel to get there (see last_block), so ranks that
/// share a GPU need room for one block each, not for all blocks at once. after_arrival: the kernel
/// began with peer_arrival. Returns false if the channel had ended or was halted before the call:
/// the kernel's outputs must then be zeroed.
__device__ inline bool peer_barrier(const PeerSignals& signals, Operation operation,
                                    bool after_arrival = false) {
  if (signals.P <= 1) return !is_poisoned(signals);
  const SignalStart start = read_start(signals);
  if (start.is_halted) return false;
  const uint32_t epoch = start.epoch + (after_arrival ? 2 : 1);
  const bool dead = start.is_poisoned;
  __syncthreads();
  send_flags(signals, epoch, start.failure);
  if (!dead) await_flags(signals, operation, epoch);
  __syncthreads();
  if (threadIdx.x == 0) signals.state->epoch = epoch;
  return !dead;
}

/// Like peer_barrier, but at the beginning of a kernel and by all its blocks, instead of a separate
/// barrier kernel.
/// REQUIRES: the blocks of all ranks that share a GPU fit on it together; the kernel ends with
/// peer_barrier and after_arrival.
__device__ inline void peer_arrival(const PeerSignals& signals, Operation operation) {
  if (signals.P <= 1) return;
  const SignalStart start = read_start(signals);
  if (start.is_halted) return;
  const uint32_t epoch = start.epoch + 1;
  const bool dead = start.is_poisoned;
  if (blockIdx.x == 0) send_flags(signals, epoch, start.failure);
  if (!dead) await_flags(signals, operation, epoch);
  __syncthreads();
}

/// True for all threads of the last block of the grid to call it; the work of the other blocks is
/// then visible to it and, after a store with release, to other ranks. writes_to_peers: the grid
/// has written memory of other GPUs, not only read it.
__device__ inline bool last_block(const PeerSignals& signals, bool writes_to_peers = true) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (writes_to_peers) {
      __threadfence_system();
    } else {
      __threadfence();
    }
    const uint32_t done = atomicAdd(&signals.state->blocks_done, 1u);
    is_last = done == gridDim.x - 1;
    if (is_last) {
      signals.state->blocks_done = 0;
      __threadfence();
    }
  }
  __syncthreads();
  return is_last;
}

/// Whether a kernel that ends with peer_barrier may simply end: it works for this rank alone and
/// its outputs are valid. The same for all threads of the grid.
__device__ inline bool ends_alone(const PeerSignals& signals) {
  return signals.P <= 1 && !is_poisoned(signals);
}

#endif  // __CUDACC__

/// Memory of every rank, as kernels see it: at addresses that the host knew, or that the exchange
/// of a queued call has found.
template <typename Value>
struct PeerPointers {
  Value* known[kMaxPeers];  // null if a rank has none; with `found`, only this rank's is set
  Value* const* found;      // [P] on the device; null: all are known

  // REQUIRES: the channel has neither ended nor halted.
  __device__ Value* of(int rank) const { return found == nullptr ? known[rank] : found[rank]; }
  /// The same for kernels compiled separately for each case, because a branch would cost too much.
  template <bool kFound>
  __device__ Value* of(int rank) const {
    return kFound ? found[rank] : known[rank];
  }
};

}  // namespace crossdock::cuda
