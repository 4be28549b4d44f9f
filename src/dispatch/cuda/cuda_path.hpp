#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/kernels/pull_sum.hpp"

namespace crossdock::cuda {

/// A call that one rank has made ready: what it shows to its peers, and what it queues when all
/// ranks have met.
struct ReadyCall {
  std::vector<MemoryHandle> handles{};
  std::function<void(const CudaRank::Met& met)> queue{};
  bool needs_barrier = true;  // peers must wait for this rank's stream before they begin
};

/// Tensors of a combine_backward, checked and taken.
struct GradientTensors {
  ConstTensorView grad_out;  // [T, D]
  ConstTensorView y;         // [R, D]
  TensorView grad_rows;      // [R, D]
  TensorView grad_weights;   // [T, K]
};

/// What the paths on a GPU have in common. A call checks its tensors, takes its outputs, makes its
/// work ready, meets the other ranks and queues the work; how that is done differs from path to
/// path. Once the ranks have met, a rank only queues until all have: an allocation could wait for
/// kernels that wait for this rank.
class CudaPath : public DevicePath {
 public:
  void set_options(const DeviceOptions& options) final { rank_.set_options(options); }
  Plan plan(const Routing& routing, const PlanOnHost& plan_on_host) override;
  Plan plan(const DenseRouting& routing, const PlanDenseOnHost& plan_on_host) final;
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args) final;
  OwnedTensor sum_rows(const char* operation, const Plan& plan, const GatherSumArgs& args) final;
  CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                         ConstTensorView y) final;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows) final;
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) final;
  void begin_aside() final { rank_.begin_aside(); }
  std::shared_ptr<const void> end_aside() final { return rank_.end_aside(); }
  void finish(const std::shared_ptr<const void>& done) final { rank_.finish(done); }
  void check() final { rank_.raise_faults(); }
  /// For waits for the stream of set_options.
  StreamWatch& watch() const { return rank_.watch(); }

 protected:
  CudaPath(DevicePathContext context, int device, Waits waits);

  /// Brings to the device what calls need of a plan that the host has made.
  virtual std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan) = 0;

  /// Rows for a dispatch; is_free: peers that have the plan may write them at once.
  struct TakenRows {
    OwnedTensor rows;
    bool is_free = false;
  };
  virtual TakenRows take_rows(const Plan& plan, DType dtype);

  // Each makes one call ready. Plan and tensors are checked, outputs are there; they stay until the
  // work is queued.
  virtual ReadyCall ready_dispatch(const Plan& plan, const DispatchArgs& args,
                                   const DispatchResult& result) = 0;
  virtual ReadyCall ready_sum(Operation operation, const Plan& plan, const GatherSumArgs& args) = 0;
  virtual ReadyCall ready_gradients(const Plan& plan, const GradientTensors& tensors) = 0;
  virtual ReadyCall ready_routes(const Plan& plan, const ConstTensorView& rows,
                                 const TensorView& routes) = 0;

  /// Runs one collective call; returns its number.
  struct Call {
    const char* operation;
    const Plan* plan;  // null: the call makes it
    std::string text;  // what all ranks must have alike
  };
  uint64_t run(Call call, const std::function<ReadyCall()>& make_ready);

  /// The part of a sum that does not depend on where rows are.
  PullSumArgs sum_args(Operation operation, const Plan& plan, const GatherSumArgs& args) const;

  CudaRank rank_;
};

}  // namespace crossdock::cuda
