#pragma once

#include <memory>
#include <span>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/cuda_path.hpp"

namespace crossdock::cuda {

/// `direct` within a node (and `hierarchical`, which is the same there): plan, put, pull. Ranks
/// meet on the host in every call and tell each other where their rows are; the kernels they then
/// queue wait for each other on the device.
class CudaDirect final : public CudaPath {
 public:
  CudaDirect(DevicePathContext context, int device);

  using CudaPath::plan;
  Plan plan(const Routing& routing, const PlanOnHost& plan_on_host) override;

 private:
  std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan) override;
  TakenRows take_rows(const Plan& plan, DType dtype) override;
  ReadyCall ready_dispatch(const Plan& plan, const DispatchArgs& args,
                           const DispatchResult& result) override;
  ReadyCall ready_sum(Operation operation, const Plan& plan, const GatherSumArgs& args) override;
  ReadyCall ready_gradients(const Plan& plan, const GradientTensors& tensors) override;
  ReadyCall ready_routes(const Plan& plan, const ConstTensorView& rows,
                         const TensorView& routes) override;

  /// A tensor of rows that peers write.
  struct Landing {
    ShownMemory shown;
    int64_t row_bytes = 0;
  };

  bool plans_on_device() const;
  /// landings: rows, then scales and row weights where the call has them.
  void queue_put(const CudaRank::Met& met, const Plan& plan, const DispatchArgs& args,
                 std::span<const Landing> landings);

  // Of the last dispatch; the next is likely to be the same.
  DType row_dtype_ = DType::kBF16;
  bool wants_landing_ = true;
};

}  // namespace crossdock::cuda
