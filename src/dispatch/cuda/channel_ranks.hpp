#pragma once

#include <string_view>
#include <vector>

#include "crossdock/extend/communicator.hpp"

namespace crossdock::cuda {

/// Which ranks this rank waits for on the GPU. It must be able to reach their memory.
enum class Waits { kNone, kForNode, kForAll };

/// The ranks that share one peer channel, in ascending order. A rank's index among them is its
/// slot; kernels see slots only. The rank itself always has one.
class ChannelRanks {
 public:
  ChannelRanks(const Topology& topology, int rank, Waits waits);

  int size() const { return static_cast<int>(ranks_.size()); }
  int rank_at(int slot) const { return ranks_[static_cast<size_t>(slot)]; }
  /// -1 for a rank outside the channel.
  int slot_of(int rank) const { return slots_[static_cast<size_t>(rank)]; }

 private:
  std::vector<int> ranks_;  // [size]
  std::vector<int> slots_;  // [P]
};

/// A strategy's requirements on its channel.
struct ChannelUse {
  std::string_view strategy;  // for messages
  Waits waits = Waits::kForAll;
  bool uses_rows_in_place = false;  // within a node, rows are not packed
  bool may_run_ahead = false;       // calls need no meeting of the hosts (RunAhead)
};

/// Throws Error(kInvalidArgument) if the strategy needs a channel of more than max_peers ranks; the
/// message says what to use instead.
void check_channel_size(const ChannelUse& use, const Topology& topology, const ChannelRanks& ranks,
                        int max_peers);

}  // namespace crossdock::cuda
