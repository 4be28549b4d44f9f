#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "layer/device_memory.hpp"

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

}  // namespace crossdock
