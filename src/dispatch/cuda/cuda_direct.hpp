#pragma once

#include <memory>

#include "dispatch/cuda/cuda_rank.hpp"

namespace crossdock::cuda {

/// `direct` within a node (and `hierarchical`, which is the same there): plan, put, pull. Ranks
/// meet on the host in every call and tell each other where their rows are; the kernels they then
/// queue wait for each other on the device.
class CudaDirect final : public DevicePath {
 public:
  CudaDirect(DevicePathContext context, int device);

  void set_options(const DeviceOptions& options) override { rank_.set_options(options); }
  Plan plan(const Routing& routing, const PlanOnHost& plan_on_host) override;
  Plan plan(const DenseRouting& routing, const PlanDenseOnHost& plan_on_host) override;
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args) override;
  OwnedTensor sum_rows(const char* operation, const Plan& plan, const GatherSumArgs& args) override;
  CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                         ConstTensorView y) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows) override;
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) override;
  void begin_aside() override { rank_.begin_aside(); }
  std::shared_ptr<const void> end_aside() override { return rank_.end_aside(); }
  void finish(const std::shared_ptr<const void>& done) override { rank_.finish(done); }
  void check() override { rank_.raise_faults(); }

 private:
  bool plans_on_device() const;
  std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan);
  OwnedTensor landing_rows(const Plan& plan, DType dtype, const Shape& shape, bool& is_ready);

  CudaRank rank_;
  // Of the last dispatch; the next is likely to be the same.
  DType row_dtype_ = DType::kBF16;
  bool wants_landing_ = true;
};

}  // namespace crossdock::cuda
