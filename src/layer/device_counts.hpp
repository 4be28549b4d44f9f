#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "crossdock/dispatcher.hpp"
#include "crossdock/moe_layer.hpp"
#include "layer/layer_parts.hpp"
#include "layer/route_counts.hpp"

namespace crossdock {

/// Counts the routes and tokens of a layer whose tokens are on GPUs, and refuses tokens that
/// several ranks hold: RouteCounts without waiting for the GPU.
class DeviceCounts {
 public:
  /// All must outlive this object. `counts` knows the groups of the losses.
  DeviceCounts(LayerParts& parts, const RouteCounts& counts, DeviceMemory& memory)
      : parts_(parts), counts_(counts), memory_(memory) {}

  /// Takes over the options of the layer's dispatcher.
  void update_device_options();

  /// Agrees on a forward with the other ranks. The refusal of any rank is thrown on all of them, at
  /// the latest by a call of the dispatcher. Collective.
  void agree(const ForwardCall& call, const std::optional<Error>& refusal);

  /// Sets the counts of a decision from its router's counts on all ranks. Collective.
  void count(const MoeForwardArgs& args, MoeDecision& decision);

 private:
  // A rank's tokens to compare with those of others.
  struct Sample {
    LocalTokens tokens{};  // in host memory
    uint64_t value = 0;    // 0: not compared
  };
  // Counts of one forward.
  struct Sums {
    RouterStatistics load;       // of the layer's group, as one sequence
    RouterStatistics batch;      // of the counting group, as one sequence
    RouterStatistics sequences;  // of the ranks that share sequences
  };

  bool counts(BalanceScope scope) const { return parts_.config.router.counts(scope); }
  void compare_samples(Group& group, Proposal proposal, const Sample& sample) const;
  void compare_in_other_groups(const MoeForwardArgs& args, const Sample& sample) const;
  Dispatcher& dispatcher_in(Group& group);
  RouterStatistics sum_sequences(const RouterStatistics& own);
  RouterStatistics sum_over(Group& group, const RouterStatistics& own);
  void set_counts(const MoeForwardArgs& args, const Sums& sums, MoeDecision& decision) const;

  LayerParts& parts_;
  const RouteCounts& counts_;
  DeviceMemory& memory_;
  std::map<Group*, Dispatcher> in_other_groups_;  // made when first needed
  bool has_compared_ = false;
};

}  // namespace crossdock
