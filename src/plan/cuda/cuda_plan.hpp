#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/device_pool.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/plan.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// The inputs of a plan on the device.
struct CudaPlanInputs {
  int64_t T = 0;
  int P = 0;
  int rank = 0;
  int64_t num_local = 0;               // E_local
  PlanShape shape{};                   // of the dispatcher; its tables outlive the plan
  std::shared_ptr<const void> tables;  // keeps them alive
  cudaStream_t stream = nullptr;
  std::shared_ptr<StreamWatch> watch;  // of the stream
  bool is_per_thread = false;          // the stream replaces the threads' own (CallersStream)
  uint64_t capture_id = 0;  // of the graph that fills the arrays again at every replay; 0: none
};

/// A plan's arrays on one device, and what the host knows about them.
class CudaPlan : public DevicePlanData {
 public:
  /// Memory for the arrays, contents unspecified.
  CudaPlan(DevicePool& pool, const CudaPlanInputs& inputs);

  /// Copies the arrays of a plan made on the host. Waits for the device, at most as long as the
  /// watch allows.
  CudaPlan(DevicePool& pool, const CudaPlanInputs& inputs, const PlanData& data);

  const DevicePlan& arrays() const { return arrays_; }
  const PlanShape& shape() const { return inputs_.shape; }
  const CudaPlanInputs& inputs() const { return inputs_; }

  void set_capacity_rows(int64_t rows) { capacity_rows_ = rows; }

  /// Rows for the first dispatch, taken before the plan was exchanged: peers that have the plan may
  /// write them at once. Empty if there are none or they have been taken.
  void set_reserved_rows(Buffer rows) { landing_ = std::move(rows); }
  Buffer take_reserved_rows() const { return std::move(landing_); }
  int64_t landing_bytes() const { return landing_.num_bytes(); }

  /// Memory for the links of R rows, contents unspecified.
  std::shared_ptr<const PlanLinks> take_links(DevicePool& pool, int64_t R) const;
  void set_links(std::shared_ptr<const PlanLinks> links) const { links_ = std::move(links); }
  /// Null if the plan has none.
  const PlanLinks* links() const { return links_.get(); }

  Device device() const override { return memory_.device(); }
  int64_t num_rows() const override;
  int64_t capacity_rows() const override;
  Segments segments() const override;
  ConstTensorView weights() const override;
  std::span<const int64_t> dropped() const override;

 private:
  CudaPlanInputs inputs_;
  Buffer memory_;
  DevicePlan arrays_{};
  std::optional<int64_t> capacity_rows_;
  mutable std::optional<int64_t> num_rows_;
  mutable std::vector<int64_t> dropped_;
  mutable Buffer landing_;
  mutable std::shared_ptr<const PlanLinks> links_;
};

/// REQUIRES: a path on a GPU made the plan.
inline const CudaPlan& device_plan(const Plan& plan) {
  return static_cast<const CudaPlan&>(*plan.device_data());
}

}  // namespace crossdock::cuda
