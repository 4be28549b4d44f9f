#pragma once

#include <functional>
#include <memory>

#include "core/cuda/device_pool.hpp"
#include "core/cuda/stream.hpp"
#include "dispatch/path.hpp"

namespace crossdock::cuda {

/// Runs calls with host tensors on a GPU path: every call copies its inputs to the GPU, waits, and
/// copies the results back. For checking GPU results with programs that only use host memory.
class HostTensors final : public Path {
 public:
  HostTensors(std::unique_ptr<Path> path, Group& group, int device);

  /// Ignores options.stream, since this path has its own; uses the other options.
  void set_options(const DeviceOptions& options) override;
  Plan plan(const Routing& routing) override;
  Plan plan(const DenseRouting& routing) override;
  /// Begun calls are complete when they return.
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) override;
  OwnedTensor gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args,
                         Begun* begun) override;
  CombineBackwardResult combine_backward(const Plan& plan,
                                         const CombineBackwardArgs& args) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) override;
  void agree_on(const Proposal& proposal) override { path_->agree_on(proposal); }
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) override;
  void finish(const std::shared_ptr<const void>& /*done*/) override {}
  void check() override { path_->check(); }
  void await() override { path_->await(); }

 private:
  /// Copies a call's inputs before the call. A failure here is this rank's refusal.
  void copy_in(const char* operation, const Plan* plan, const std::function<void()>& uploads);
  OwnedTensor upload(const ConstTensorView& tensor);
  OwnedTensor upload_rows(const Plan& plan, const ConstTensorView& rows);
  OwnedTensor upload_as(const Shape& shape, const ConstTensorView& tensor);
  OwnedTensor download(const ConstTensorView& tensor, int64_t num_rows, const TensorView& given);
  template <typename AnyRouting>
  Plan plan_copy(const ConstTensorView& routes, const AnyRouting& routing);
  Plan copy_out(const Plan& device_plan);

  Group& group_;
  std::shared_ptr<const OwnedStream> stream_;  // plans also keep it alive
  DevicePool pool_;
  std::unique_ptr<Path> path_;
};

}  // namespace crossdock::cuda
