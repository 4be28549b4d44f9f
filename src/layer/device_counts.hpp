#pragma once

#include <optional>
#include <string>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/moe_layer.hpp"
#include "layer/device_memory.hpp"

namespace crossdock {

/// Counts the routes and tokens of a layer whose tokens are on GPUs, and refuses tokens that
/// several ranks hold: RouteCounts without waiting.
///
/// The counts travel as rows of a small dispatcher: each rank sends its only token to all ranks.
class DeviceCounts {
 public:
  /// All must outlive this object.
  DeviceCounts(Group& group, const MoeLayerConfig& config, const Router& router,
               DeviceMemory& memory);

  void set_device_options(const DeviceOptions& options, Stream stream);

  /// Agrees on a forward with the other ranks. The refusal of any rank is thrown on all of them, at
  /// the latest by a call of the dispatcher. Collective.
  void agree(Dispatcher& dispatcher, const MoeForwardArgs& args, const std::string& config_text,
             const std::optional<Error>& refusal);

  /// Call this after a call of the layer has failed: a plan made in it may be empty.
  void forget_plan() { plan_ = {}; }

  /// Sets the counts of a decision from its router's counts on all ranks. Collective.
  void count(const MoeForwardArgs& args, MoeDecision& decision);

 private:
  bool counts(BalanceScope scope) const { return config_.router.counts(scope); }
  void set_counts(const MoeForwardArgs& args, const RouterStatistics& batch,
                  MoeDecision& decision) const;
  OwnedTensor sum(const ConstTensorView& counts, int64_t num_sequences);
  Plan plan_to_all(Device device);
  OwnedTensor gather(const ConstTensorView& own);

  Group& group_;
  const MoeLayerConfig& config_;
  const Router& router_;
  DeviceMemory& memory_;
  Stream stream_;
  Dispatcher to_all_;
  Plan plan_;                         // of to_all_; set by the first count outside a capture
  std::vector<Plan> captured_plans_;  // of to_all_; used by graphs
  bool has_compared_ = false;
};

}  // namespace crossdock
