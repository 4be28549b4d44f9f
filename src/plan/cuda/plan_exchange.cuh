#pragma once

#include "comm/cuda/peer_calls.cuh"
#include "comm/cuda/peer_signals.cuh"
#include "core/cuda/launch.hpp"
#include "plan/cuda/device_plan.hpp"

// The words with which ranks exchange the counts of a plan, or the reason why one refuses its
// input.

namespace crossdock::cuda {

/// Header words that a rank sends ahead of its counts.
enum PlanHeader : int { kStatus, kRouteLow, kRouteHigh, kValueLow, kValueHigh, kHeaderWords };

// Sends a word to all other ranks.
__device__ inline void send_word(const PeerSignals& signals, uint32_t epoch, int64_t index,
                                 uint32_t value) {
#pragma unroll 1
  for (int p = 0; p < signals.P; ++p) {
    if (p == signals.rank) continue;
    std::byte* inbox = signals.mailbox[p] +
                       Mailbox::word_offset(epoch, signals.P, signals.rank, signals.max_words);
    store_relaxed(reinterpret_cast<uint64_t*>(inbox) + index, pack_word(epoch, value));
  }
}

// Receives word `index` of up to kCount ranks, `first` and up; 0 from this rank itself. Returns
// false, and 0 for its word, if a rank did not send in time or is at another call.
template <bool kQueued, int kCount>
__device__ inline bool receive_words(const PlanArgs& args, uint32_t epoch, int first, int64_t index,
                                     uint32_t (&values)[kCount]) {
  const PeerSignals& signals = args.signals;
  const int count = min(kCount, signals.P - first);
  const auto* inbox = reinterpret_cast<const uint64_t*>(
      signals.mailbox[signals.rank] +
      Mailbox::word_offset(epoch, signals.P, first, signals.max_words) +
      index * static_cast<int64_t>(sizeof(uint64_t)));
  const int max_words = static_cast<int>(signals.max_words);
  Patience patience(signals);
  uint64_t words[kCount];
  int missing = first;
  while (missing >= 0) {
    missing = -1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i] = load_relaxed(inbox + min(i, count - 1) * max_words);
    }
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) {
      const bool is_awaited = i < count && first + i != signals.rank;
      if (is_awaited && static_cast<uint32_t>(words[i]) != epoch) missing = first + i;
    }
    if (missing < 0) break;
    if (patience.is_over()) [[unlikely]] {
      give_up(signals, missing, Operation::kPlan, epoch);
      break;
    }
    // If this plan was queued, all ranks are making it.
    if (!kQueued && patience.should_look_around()) [[unlikely]] {
      if (halts_instead(signals, missing, Operation::kPlan, epoch)) break;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] =
        static_cast<uint32_t>(words[i]) == epoch ? static_cast<uint32_t>(words[i] >> 32) : 0;
  }
  return missing < 0;
}

// Why this rank refuses its input, or that it has failed; all 0 if neither.
struct Refusal {
  uint32_t status;  // FaultCode
  int64_t place;    // pack_route
  int64_t value;

  __device__ uint32_t word(int index) const {
    switch (index) {
      case kStatus:
        return status;
      case kRouteLow:
        return static_cast<uint32_t>(place);
      case kRouteHigh:
        return static_cast<uint32_t>(place >> 32);
      case kValueLow:
        return static_cast<uint32_t>(value);
      default:
        return static_cast<uint32_t>(value >> 32);
    }
  }
};

__device__ inline Refusal find_refusal(const PlanArgs& args) {
  const uint64_t bad_route = *static_cast<const volatile uint64_t*>(&args.signals.state->bad_route);
  const uint32_t poison = *static_cast<const volatile uint32_t*>(&args.signals.state->poison);
  Refusal refusal{};
  if (bad_route != ~uint64_t{0}) {
    const auto route = static_cast<int64_t>(bad_route >> 8);
    refusal.status = static_cast<uint32_t>(bad_route & 0xff);
    if (refusal.status == static_cast<uint32_t>(FaultCode::kWeightNotFinite)) {
      refusal.value = __float_as_uint(args.routing.weights[route]);
    } else {
      refusal.value = args.routing.ids_are_64_bit
                          ? static_cast<const int64_t*>(args.routing.expert_ids)[route]
                          : static_cast<const int32_t*>(args.routing.expert_ids)[route];
    }
    const bool is_crowded = refusal.status == static_cast<uint32_t>(FaultCode::kTooManyRoutes);
    refusal.place =
        pack_route(route / args.shape.K,
                   is_crowded ? args.shape.K : static_cast<int32_t>(route % args.shape.K));
  }
  if (poison != 0) {
    refusal.status = static_cast<uint32_t>(FaultCode::kPeerFailed);
    refusal.value = failure_of(poison);
  }
  return refusal;
}

// The part of a plan that one block per rank does: sends counts to all peers, receives theirs and
// computes where every expert's rows begin. All ranks compute the same result from the same words.
//
// kQueued: the hosts have not met, so the ranks also exchange which call this is (args.call).
//
// The code runs once per call, and fetching its instructions takes longer than running them: loops
// are not unrolled (a plan of 128 tokens took 13.0 us with the compiler's choice and takes 11.8).

inline constexpr int kMostPlanWarps = 16;  // so that two blocks share an SM

/// Shared memory of the exchanging block, segment_bytes(E) of it.
struct SegmentMemory {
  int64_t* sums;      // [E + 1] aligned rows of all preceding experts, in the order of by_owner
  int32_t* used;      // [E] rows of expert e that Segments counts
  int32_t* base;      // [E] rows that this rank sends to expert e; then its first row of expert e,
                      // in the expert's segment, then at its owner
  int32_t* by_owner;  // [E] copies of PlanShape's tables
  int32_t* owner;     // [E]
  int32_t* owner_offsets;             // [P + 1]
  uint32_t (*headers)[kHeaderWords];  // of every rank

  static __device__ SegmentMemory carve(int64_t* memory, int32_t E) {
    __shared__ int32_t offsets[kMaxPeers + 1];
    __shared__ uint32_t headers[kMaxPeers][kHeaderWords];
    auto* after = reinterpret_cast<int32_t*>(memory + E + 1);
    return {memory, after, after + E, after + 2 * E, after + 3 * E, offsets, headers};
  }
};

// Turns the counts of all blocks into exclusive sums over blocks; returns the total of expert e.
__device__ inline int64_t sum_blocks(const PlanArgs& args, int e) {
  constexpr int kInFlight = 16;
  const int32_t E = args.shape.E;
  const int num_blocks = static_cast<int>(gridDim.x);
  int32_t sum = 0;
#pragma unroll 1
  for (int first = 0; first < num_blocks; first += kInFlight) {
    int32_t counts[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const bool there = first + i < num_blocks;
      counts[i] =
          there ? __ldcg(&args.scratch.block_sums[static_cast<int64_t>(first + i) * E + e]) : 0;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i < num_blocks)
        args.scratch.block_sums[static_cast<int64_t>(first + i) * E + e] = sum;
      sum += counts[i];
    }
  }
  return sum;
}

// Sends this rank's call, if the hosts have not met, its header and its counts to all peers and
// keeps header and counts for itself; sends nothing if the channel is halted. total_of(e): routes
// of this rank to expert e. If a rank refuses its input or has failed, nobody uses its counts.
template <bool kQueued, typename TotalOf>
__device__ inline void send_counts(const PlanArgs& args, const SignalStart& start,
                                   const SegmentMemory& segments, const TotalOf& total_of) {
  const uint32_t epoch = start.epoch + 1;
  if (kQueued && !start.is_halted) {
    send_call(args.signals, args.call, epoch, start.failure);
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kHeaderWords + args.shape.E;
       i += static_cast<int>(blockDim.x)) {
    uint32_t word = 0;
    if (i < kHeaderWords) {
      word = find_refusal(args).word(i);
      segments.headers[args.signals.rank][i] = word;
    } else {
      const int e = i - kHeaderWords;
      const int64_t total = total_of(e);
      const int64_t kept = min(total, args.shape.capacity);
      args.plan.dropped[e] = total - kept;
      word = static_cast<uint32_t>(kept);
      segments.base[e] = static_cast<int32_t>(kept);
    }
    if (!start.is_halted) send_word(args.signals, epoch, i, word);
  }
}

// Records why the plan is refused: the same fault on all ranks.
template <bool kQueued>
__device__ inline void refuse_plan(const PlanArgs& args, const Fault& fault) {
  if (kQueued) {
    halt(args.signals, fault);
  } else {
    record_fault(args.signals, &args.signals.faults->refused, fault);
  }
}

// Records the refusal of the first rank that refused; headers as received.
template <bool kQueued>
__device__ inline void record_refusal(const PlanArgs& args, uint32_t epoch,
                                      const uint32_t (*headers)[kHeaderWords]) {
  const PeerSignals& signals = args.signals;
  int refusing = 0;
  while (refusing < signals.P && headers[refusing][kStatus] == 0) ++refusing;
  if (refusing == signals.P) return;
  const uint32_t* header = headers[refusing];
  if (header[kStatus] == static_cast<uint32_t>(FaultCode::kPeerFailed)) {
    follow_failure(signals, refusing, header[kValueLow], Operation::kPlan, epoch);
    return;
  }
  const auto join = [&](int low, int high) {
    return static_cast<int64_t>(static_cast<uint64_t>(header[high]) << 32 | header[low]);
  };
  refuse_plan<kQueued>(args, {.code = header[kStatus],
                              .culprit = refusing,
                              .operation = static_cast<uint32_t>(Operation::kPlan),
                              .epoch = epoch,
                              .route = join(kRouteLow, kRouteHigh),
                              .value = join(kValueLow, kValueHigh)});
}

// The word that this thread has sent.
__device__ inline uint32_t own_word(int index, const SegmentMemory& segments, int rank) {
  if (index < kHeaderWords) return segments.headers[rank][index];
  return static_cast<uint32_t>(segments.base[index - kHeaderWords]);
}

// Stores all ranks' counts in plan.counts, and their sums. Returns false on every rank if one of
// them refused.
template <bool kQueued>
__device__ inline bool receive_counts(const PlanArgs& args, uint32_t epoch,
                                      const SegmentMemory& segments) {
  constexpr int kRanksAtOnce = 8;
  const PeerSignals& signals = args.signals;
  const int32_t E = args.shape.E;
  const bool dead = is_poisoned(signals);
  bool is_complete = !dead;  // and nobody refused
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kHeaderWords + E;
       i += static_cast<int>(blockDim.x)) {
    int64_t used = 0;
    int64_t before = 0;
#pragma unroll 1
    for (int first = 0; first < signals.P; first += kRanksAtOnce) {
      uint32_t values[kRanksAtOnce] = {};
      if (!dead && signals.P > 1) {
        is_complete = receive_words<kQueued>(args, epoch, first, i, values) && is_complete;
      }
#pragma unroll
      for (int j = 0; j < kRanksAtOnce; ++j) {
        const int source = first + j;
        if (source >= signals.P) continue;
        if (source == signals.rank) values[j] = own_word(i, segments, signals.rank);
        if (i < kHeaderWords) {
          segments.headers[source][i] = values[j];
          if (i == kStatus && values[j] != 0) is_complete = false;
          continue;
        }
        args.plan.counts[source * E + i - kHeaderWords] = static_cast<int32_t>(values[j]);
        used += values[j];
        if (source < signals.rank) before += values[j];
      }
    }
    if (i < kHeaderWords) continue;
    if (args.shape.pad_to_capacity) {
      used = args.shape.capacity * signals.P;
      before = args.shape.capacity * signals.rank;
    }
    segments.used[i - kHeaderWords] = static_cast<int32_t>(min(used, PlanShape::kMostRows));
    segments.base[i - kHeaderWords] = static_cast<int32_t>(min(before, PlanShape::kMostRows));
  }
  if (__syncthreads_and(is_complete)) [[likely]] {
    return true;
  }
  if (threadIdx.x == 0) record_refusal<kQueued>(args, epoch, segments.headers);
  __syncthreads();
  return false;
}

__device__ inline int64_t warp_inclusive_sum(int64_t value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t below = __shfl_up_sync(~0u, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

// Exclusive sum over the threads of a block; `total` is the sum of all.
__device__ inline int64_t block_exclusive_sum(int64_t value, int64_t& total) {
  __shared__ int64_t warp_sums[kMostPlanWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t inclusive = warp_inclusive_sum(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  int64_t of_warps = lane < num_warps ? warp_sums[lane] : 0;
  of_warps = warp_inclusive_sum(of_warps);
  total = __shfl_sync(~0u, of_warps, 31);
  const int64_t before = __shfl_sync(~0u, of_warps, max(warp - 1, 0));
  __syncthreads();
  return (warp > 0 ? before : 0) + inclusive - value;
}

// Fills segments.sums.
__device__ inline void sum_segments(const PlanArgs& args, const SegmentMemory& segments) {
  int64_t carry = 0;
#pragma unroll 1
  for (int first = 0; first < args.shape.E; first += static_cast<int>(blockDim.x)) {
    const int i = first + static_cast<int>(threadIdx.x);
    int64_t aligned = 0;
    if (i < args.shape.E) {
      int64_t used = segments.used[segments.by_owner[i]];
      if (used == 0 && args.shape.keep_empty_segments) used = 1;
      const auto alignment = static_cast<uint32_t>(args.shape.alignment);
      aligned = (static_cast<uint32_t>(used) + alignment - 1) / alignment * alignment;
    }
    int64_t total = 0;
    const int64_t sum = carry + block_exclusive_sum(aligned, total);
    if (i < args.shape.E) segments.sums[i] = sum;
    carry += total;
  }
  if (threadIdx.x == 0) segments.sums[args.shape.E] = carry;
  __syncthreads();
}

// Records that the fullest rank (the lowest one if several) has more rows than max_rows.
template <bool kQueued>
__device__ inline void record_rows(const PlanArgs& args, uint32_t epoch,
                                   const SegmentMemory& segments) {
  const int32_t* offsets = segments.owner_offsets;
  int fullest = 0;
  int64_t most = 0;
  for (int p = 0; p < args.signals.P; ++p) {
    const int64_t rows = segments.sums[offsets[p + 1]] - segments.sums[offsets[p]];
    if (rows > most) fullest = p;
    most = max(most, rows);
  }
  refuse_plan<kQueued>(args, {.code = static_cast<uint32_t>(FaultCode::kTooManyRows),
                              .culprit = fullest,
                              .operation = static_cast<uint32_t>(Operation::kPlan),
                              .epoch = epoch,
                              .route = most,
                              .value = 0});
}

// Writes the rows of every rank. Returns false on every rank if one has more than max_rows.
template <bool kQueued>
__device__ inline bool check_rows(const PlanArgs& args, uint32_t epoch,
                                  const SegmentMemory& segments) {
  const int32_t* offsets = segments.owner_offsets;
  bool fits = true;
#pragma unroll 1
  for (int p = static_cast<int>(threadIdx.x); p < args.signals.P;
       p += static_cast<int>(blockDim.x)) {
    const int64_t rows = segments.sums[offsets[p + 1]] - segments.sums[offsets[p]];
    args.plan.rows_per_rank[p] = rows;
    fits = fits && rows <= args.shape.max_rows;
  }
  if (__syncthreads_and(fits)) [[likely]] {
    return true;
  }
  if (threadIdx.x == 0) record_rows<kQueued>(args, epoch, segments);
  return false;
}

// Writes where this rank's rows of each expert begin, and the segments of this rank's experts.
__device__ inline void write_segments(const PlanArgs& args, const SegmentMemory& segments) {
  const int32_t* offsets = segments.owner_offsets;
  const int rank = args.signals.rank;
  const int first_local = offsets[rank];
  const int end_local = offsets[rank + 1];
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < args.shape.E; i += static_cast<int>(blockDim.x)) {
    const int e = segments.by_owner[i];
    const int64_t start = segments.sums[i] - segments.sums[offsets[segments.owner[e]]];
    segments.base[e] += static_cast<int32_t>(start);
    args.scratch.route_base[e] = segments.base[e];
    args.plan.segment_starts[e] = static_cast<int32_t>(start);
    if (i < first_local || i >= end_local) continue;
    args.plan.local_starts[i - first_local] = start;
    args.plan.local_counts[i - first_local] = segments.used[e];
  }
  if (threadIdx.x == 0) {
    args.plan.local_starts[end_local - first_local] =
        segments.sums[end_local] - segments.sums[first_local];
  }
}

__device__ inline void write_empty_plan(const PlanArgs& args, const SegmentMemory& segments) {
  const int threads = static_cast<int>(blockDim.x);
  const int32_t* offsets = args.shape.owner_offsets;
  const int num_local = offsets[args.signals.rank + 1] - offsets[args.signals.rank];
  for (int i = static_cast<int>(threadIdx.x); i < args.shape.E; i += threads) {
    segments.base[i] = -1;
    args.scratch.route_base[i] = -1;
    args.plan.dropped[i] = 0;
    args.plan.segment_starts[i] = 0;
    for (int p = 0; p < args.signals.P; ++p) {
      args.plan.counts[static_cast<int64_t>(p) * args.shape.E + i] = 0;
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i <= num_local; i += threads) {
    args.plan.local_starts[i] = 0;
    if (i < num_local) args.plan.local_counts[i] = 0;
  }
  for (int p = static_cast<int>(threadIdx.x); p < args.signals.P; p += threads) {
    args.plan.rows_per_rank[p] = 0;
  }
}

// Copies the tables, which do not change, to shared memory.
__device__ inline void read_tables(const PlanArgs& args, const SegmentMemory& segments) {
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < args.shape.E; e += threads) {
    segments.by_owner[e] = args.shape.by_owner[e];
    segments.owner[e] = args.shape.owner[e];
  }
#pragma unroll 1
  for (int p = static_cast<int>(threadIdx.x); p <= args.signals.P; p += threads) {
    segments.owner_offsets[p] = args.shape.owner_offsets[p];
  }
}

// One block per rank, after send_counts. Afterwards segments.base and route_base are set; they are
// -1 everywhere in a plan that was refused. REQUIRES: read_tables.
template <bool kQueued>
__device__ inline void finish_exchange(const PlanArgs& args, const SignalStart& start,
                                       const SegmentMemory& segments) {
  const uint32_t epoch = start.epoch + 1;
  bool agreed = !start.is_halted;
  if (kQueued && !start.is_poisoned) {
    agreed = await_calls(args.signals, args.call, Operation::kPlan, epoch, nullptr);
  }
  agreed = agreed && receive_counts<kQueued>(args, epoch, segments);
  // Now that all ranks have sent their counts, no kernel that a rank waits for needs room.
  allow_next_kernel();
  if (agreed) {
    sum_segments(args, segments);
    agreed = check_rows<kQueued>(args, epoch, segments);
  }
  if (agreed) [[likely]] {
    write_segments(args, segments);
  } else {
    write_empty_plan(args, segments);
  }
  if (threadIdx.x == 0) {
    if (!start.is_halted) args.signals.state->epoch = epoch;
    args.signals.state->bad_route = ~uint64_t{0};
  }
  __syncthreads();
}

}  // namespace crossdock::cuda
