#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"

// How ranks agree on calls when their hosts do not meet. Each rank's kernels tell the peers which
// call they belong to and where this rank's memory is. All ranks read the same records and come to
// the same result: if the calls differ, or a rank refuses its own, the channels of all ranks are
// halted at the same epoch, before anything has moved.

namespace crossdock::cuda {

/// Maximum number of pieces of memory that a rank shows its peers in one call.
inline constexpr int kMostShown = 4;

/// What a rank tells its peers when a queued call begins.
struct QueuedCall {
  uint32_t number = 0;  // of this rank's call, from 1; 0: the hosts have met, nothing is exchanged
  uint32_t hash = 0;    // of what must be identical on every rank; or one of the values below
  int32_t num_shown = 0;
  int64_t offsets[kMostShown] = {};  // of the memory that it shows, see PeerMemory; or kNoMemory

  static constexpr uint32_t kRefuses = 0;    // this rank refuses the call
  static constexpr uint32_t kStops = 1;      // this rank queues no further calls
  static constexpr uint32_t kFirstHash = 2;  // hashes are in [kFirstHash, kFailed)
  static constexpr uint32_t kFailed = Mailbox::kFailedRecord + 1;  // or above: see failure_of
  static constexpr int64_t kNoMemory = INT64_MIN;
};

/// A call as peers see it, in their mailboxes.
struct alignas(Mailbox::kRecordBytes) CallRecord {
  uint64_t flag;  // epoch, and QueuedCall::hash above it
  int64_t offsets[kMostShown];
};
static_assert(sizeof(CallRecord) == Mailbox::kRecordBytes);

/// Addresses, for kernels of this rank, of the memory that each rank shows in the current call.
struct ShownMemory {
  std::byte* rows[kMostShown][kMaxPeers];
};

/// Where each rank's memory begins for kernels of this rank, which add the rank's offsets to it.
struct PeerBases {
  std::byte* base[kMaxPeers];
};

#if defined(__CUDACC__)

__device__ inline CallRecord* record_at(std::byte* mailbox, uint32_t epoch, int source) {
  return reinterpret_cast<CallRecord*>(mailbox + Mailbox::record_offset(epoch, source));
}

/// Sends this rank's call to all ranks, or its failure if its channel has ended. Called by all
/// threads of a block.
__device__ inline void send_call(const PeerSignals& signals, const QueuedCall& call, uint32_t epoch,
                                 uint32_t failure) {
  const uint32_t hash = failure == 0 ? call.hash : Mailbox::kFailedRecord + failure;
  for (int p = static_cast<int>(threadIdx.x); p < signals.P; p += static_cast<int>(blockDim.x)) {
    CallRecord* record = record_at(signals.mailbox[p], epoch, signals.rank);
    for (int i = 0; i < call.num_shown; ++i) {
      store_relaxed(reinterpret_cast<uint64_t*>(&record->offsets[i]),
                    static_cast<uint64_t>(call.offsets[i]));
    }
    store_release(&record->flag, pack_word(epoch, hash));
  }
}

/// Whether rank `peer` is at a plain barrier or plan of this epoch, whose hosts have met.
__device__ inline bool is_at_other_kind(const PeerSignals& signals, int peer, uint32_t epoch) {
  const std::byte* mailbox = signals.mailbox[signals.rank];
  const auto read = [&](int64_t offset) {
    return load_acquire(reinterpret_cast<const uint64_t*>(mailbox + offset));
  };
  if (!is_before(read(Mailbox::flag_offset(peer)), epoch)) return true;
  if (signals.max_words == 0) return false;
  const uint64_t first = read(Mailbox::word_offset(epoch, signals.P, peer, signals.max_words));
  return static_cast<uint32_t>(first) == epoch;
}

/// Waits for the call of rank `peer`; returns its hash, kStops if it is at another kind of call, or
/// kFailed if it does not arrive.
__device__ inline uint32_t await_call(const PeerSignals& signals, int peer, Operation operation,
                                      uint32_t epoch) {
  const uint64_t* flag = &record_at(signals.mailbox[signals.rank], epoch, peer)->flag;
  Patience patience(signals);
  uint64_t word = load_acquire(flag);
  bool was_elsewhere = false;  // asked twice: words of the same call may arrive before its record
  while (is_before(word, epoch)) {
    const bool is_over = patience.is_over();
    word = load_acquire(flag);
    if (!is_before(word, epoch)) break;
    if (patience.should_look_around()) {
      const bool is_elsewhere = is_at_other_kind(signals, peer, epoch);
      if (is_elsewhere && was_elsewhere) return QueuedCall::kStops;
      was_elsewhere = is_elsewhere;
    }
    if (!is_over) continue;
    give_up(signals, peer, operation, epoch);
    return QueuedCall::kFailed;
  }
  const auto hash = static_cast<uint32_t>(word >> 32);
  const bool has_failed = hash >= QueuedCall::kFailed;
  if (has_failed || static_cast<uint32_t>(word) != epoch) {
    const uint32_t failure = has_failed ? hash - Mailbox::kFailedRecord : ChannelFailure::kFailed;
    follow_failure(signals, peer, failure, operation, epoch);
    return QueuedCall::kFailed;
  }
  return hash;
}

/// Records the addresses of the memory that rank `peer` shows.
__device__ inline void note_shown(const PeerSignals& signals, const QueuedCall& call, int peer,
                                  std::byte* base, uint32_t epoch) {
  const CallRecord* record = record_at(signals.mailbox[signals.rank], epoch, peer);
  for (int i = 0; i < call.num_shown; ++i) {
    const auto offset =
        static_cast<int64_t>(load_relaxed(reinterpret_cast<const uint64_t*>(&record->offsets[i])));
    const intptr_t address = reinterpret_cast<intptr_t>(base) + offset;
    signals.shown->rows[i][peer] =
        offset == QueuedCall::kNoMemory ? nullptr : reinterpret_cast<std::byte*>(address);
  }
}

/// Waits for the calls of all ranks, after send_call. Returns whether all make the same call; if
/// not, the channel is halted or has ended. `bases` may be null if nothing is shown. Called by all
/// threads of a block.
__device__ inline bool await_calls(const PeerSignals& signals, const QueuedCall& call,
                                   Operation operation, uint32_t epoch, const PeerBases* bases) {
  bool has_failed = false;
  bool stops = false;
  bool differs = call.hash == QueuedCall::kRefuses;
  for (int p = static_cast<int>(threadIdx.x); p < signals.P; p += static_cast<int>(blockDim.x)) {
    const uint32_t hash = await_call(signals, p, operation, epoch);
    has_failed = has_failed || hash == QueuedCall::kFailed;
    stops = stops || hash == QueuedCall::kStops;
    differs = differs || hash != call.hash;
    if (hash == call.hash) note_shown(signals, call, p, bases ? bases->base[p] : nullptr, epoch);
  }
  if (__syncthreads_or(has_failed)) return false;
  const bool somebody_stops = __syncthreads_or(stops);
  if (!__syncthreads_or(differs) && !somebody_stops) return true;
  if (threadIdx.x == 0) {
    const FaultCode code = somebody_stops ? FaultCode::kStopped : FaultCode::kOtherCall;
    halt(signals, {.code = static_cast<uint32_t>(code),
                   .culprit = signals.rank,
                   .operation = static_cast<uint32_t>(operation),
                   .epoch = epoch,
                   .route = call.number,
                   .value = 0});
  }
  __syncthreads();
  return false;
}

#endif  // __CUDACC__

}  // namespace crossdock::cuda
