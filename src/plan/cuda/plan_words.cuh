#pragma once

#include "comm/cuda/peer_signals.cuh"
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

}  // namespace crossdock::cuda
