#pragma once

#include "comm/cuda/peer_signals.cuh"

namespace crossdock::cuda {

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
