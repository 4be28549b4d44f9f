#pragma once

#include <functional>
#include <memory>

#include "core/cuda/device_pool.hpp"
#include "core/cuda/stream.hpp"
#include "dispatch/cuda/cuda_path.hpp"

namespace crossdock::cuda {

/// Host tensors on a device path: every call copies its inputs to the device, waits, and copies the
/// results back. For checking GPU results with programs that know host memory only.
class HostStaging final : public DevicePath {
 public:
  HostStaging(std::unique_ptr<CudaPath> path, Group& group, int device);
  ~HostStaging() override;

  /// The stream is the staging's own; the rest counts.
  void set_options(const DeviceOptions& options) override;
  Plan plan(const Routing& routing, const PlanOnHost& plan_on_host) override;
  Plan plan(const DenseRouting& routing, const PlanDenseOnHost& plan_on_host) override;
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args) override;
  OwnedTensor sum_rows(const char* operation, const Plan& plan, const GatherSumArgs& args) override;
  CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                         ConstTensorView y) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows) override;
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) override;
  void begin_aside() override {}  // results are copied back before a call returns
  std::shared_ptr<const void> end_aside() override { return nullptr; }
  void finish(const std::shared_ptr<const void>& /*done*/) override {}
  void check() override { path_->check(); }

 private:
  /// Copies of a call's inputs, made ahead of it. A rank that fails in this refuses the call of
  /// all.
  void copy_in(const char* operation, const Plan* plan, const std::function<void()>& uploads);
  OwnedTensor upload(const ConstTensorView& tensor);
  OwnedTensor upload_rows(const Plan& plan, const ConstTensorView& rows);
  OwnedTensor upload_as(const Shape& shape, const ConstTensorView& tensor);
  OwnedTensor download(const ConstTensorView& tensor, int64_t num_rows, const TensorView& given);
  template <typename AnyRouting>
  Plan plan_copy(const ConstTensorView& routes, const AnyRouting& routing,
                 const std::function<Plan(const AnyRouting&)>& plan_on_host);
  Plan finish(const Plan& device_plan);

  Group& group_;
  std::shared_ptr<const OwnedStream> stream_;  // plans keep it too
  DevicePool pool_;
  std::unique_ptr<CudaPath> path_;
};

}  // namespace crossdock::cuda
