#pragma once

#include <span>
#include <vector>

#include "dispatch/framed_path.hpp"

namespace crossdock {

/// Makes a plan from a routing in host memory. Collective.
Plan make_host_plan(const PathContext& context, const Routing& routing);
Plan make_host_plan(const PathContext& context, const DenseRouting& routing);

/// The path for tensors in host memory: the dispatcher's strategy moves the rows. A call is done
/// when it returns.
class HostPath final : public FramedPath {
 public:
  explicit HostPath(PathContext context);

  Plan plan(const Routing& routing) override { return make_host_plan(context(), routing); }
  Plan plan(const DenseRouting& routing) override { return make_host_plan(context(), routing); }
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) override;
  void begin_aside() override {}
  std::shared_ptr<const void> end_aside() override { return nullptr; }
  void finish(const std::shared_ptr<const void>& /*done*/) override {}
  void set_options(const DeviceOptions& /*options*/) override {}
  void check() override {}
  void await() override {}

 private:
  void check_usable() override {}
  void check_tensor(const char* name, const ConstTensorView& tensor,
                    const Shape& shape) const override;
  OwnedTensor take(DType dtype, const Shape& shape) override;
  OwnedTensor output_or_new(const char* name, const TensorView& given, DType dtype,
                            const Shape& shape) override;
  OwnedTensor take_rows(const char* operation, const Plan& plan, DType dtype) override;

  ReadyCall ready_dispatch(const Plan& plan, const DispatchArgs& args,
                           const DispatchResult& result) override;
  ReadyCall ready_gather_sum(const char* operation, const Plan& plan,
                             const GatherSumArgs& args) override;
  ReadyCall ready_combine_backward(const Plan& plan, const GradientTensors& tensors) override;
  ReadyCall ready_collect_routes(const Plan& plan, const ConstTensorView& rows,
                                 const TensorView& routes) override;

  void scatter_tokens(const Exchange& exchange, std::span<const RowPart> parts,
                      const DispatchArgs& args, const DispatchResult& result);

  Strategy& strategy() const { return *context().strategy; }
};

}  // namespace crossdock
