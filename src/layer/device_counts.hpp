#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/moe_layer.hpp"
#include "layer/device_memory.hpp"
#include "layer/route_counts.hpp"

namespace crossdock {

/// The rows that a DeviceGather carries.
struct GatheredRows {
  int64_t width;     // values per row
  int64_t max_rows;  // of all ranks together
};

/// Gathers the rows of all ranks of a group on every rank, on GPUs and without waiting: the
/// dispatcher has one expert on each rank, and every rank sends its rows to all of them.
class DeviceGather {
 public:
  /// `group` and `memory` must outlive this object.
  DeviceGather(Group& group, const GatheredRows& rows, DeviceMemory& memory);

  const GatheredRows& config() const { return config_; }
  /// The layer's, with the stream of its calls.
  void set_device_options(const DeviceOptions& options);

  /// [t, width] on each rank -> [max_rows, width]: the rows of rank 0, then those of rank 1, and so
  /// on; the rest is unspecified. Later calls use the plan of the first again, so t must not change
  /// on any rank before forget_plan. Collective.
  OwnedTensor gather(const ConstTensorView& rows);

  /// Must be called on all ranks of the group or on none.
  void forget_plan() { plan_ = {}; }

 private:
  Plan plan_to_all(int64_t num_rows, Device device);

  Group& group_;
  GatheredRows config_;
  DeviceMemory& memory_;
  Stream stream_;
  Dispatcher to_all_;
  Plan plan_;                         // of the first call outside a capture
  std::vector<Plan> captured_plans_;  // used by graphs
};

/// Counts the routes and tokens of a layer whose tokens are on GPUs, and refuses tokens that
/// several ranks hold: RouteCounts without waiting for the GPU.
class DeviceCounts {
 public:
  /// All must outlive this object. `counts` knows the groups of the losses.
  DeviceCounts(Group& group, const MoeLayerConfig& config, const RouteCounts& counts,
               const Router& router, DeviceMemory& memory);

  /// The layer's, with the stream of its calls.
  void set_device_options(const DeviceOptions& options);

  /// Agrees on a forward with the other ranks. The refusal of any rank is thrown on all of them, at
  /// the latest by a call of the dispatcher. Collective.
  void agree(Dispatcher& dispatcher, const ForwardCall& call, const std::optional<Error>& refusal);

  /// Call this after a call of the layer has failed: a plan made in it may be empty.
  void forget_plans();

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

  bool counts(BalanceScope scope) const { return config_.router.counts(scope); }
  void compare_samples(Group& group, Proposal proposal, const Sample& sample) const;
  void compare_in_other_groups(const MoeForwardArgs& args, const Sample& sample) const;
  RouterStatistics sum_over(Group& group, const RouterStatistics& own);
  OwnedTensor sum(const ConstTensorView& counts, int64_t num_sequences);
  DeviceGather& gather_of(Group& group, int64_t num_counts);
  OwnedTensor padded(const OwnedTensor& counts);
  void set_counts(const MoeForwardArgs& args, const Sums& sums, MoeDecision& decision) const;

  Group& group_;
  const MoeLayerConfig& config_;
  const RouteCounts& counts_;
  const Router& router_;
  DeviceMemory& memory_;
  DeviceOptions options_;
  std::map<std::pair<Group*, int64_t>, std::unique_ptr<DeviceGather>> gathers_;  // by width
  bool has_compared_ = false;
};

}  // namespace crossdock
