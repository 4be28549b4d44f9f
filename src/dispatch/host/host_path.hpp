#pragma once

#include <memory>
#include <span>

#include "dispatch/path.hpp"

namespace crossdock {

/// Makes a plan from a routing in host memory. Collective.
Plan make_host_plan(const PathContext& context, const Routing& routing);
Plan make_host_plan(const PathContext& context, const DenseRouting& routing);

/// The path for tensors in host memory: the dispatcher's strategy moves the rows. A call is done
/// when it returns.
class HostPath final : public Path {
 public:
  explicit HostPath(PathContext context);

  Plan plan(const Routing& routing) override { return make_host_plan(context_, routing); }
  Plan plan(const DenseRouting& routing) override { return make_host_plan(context_, routing); }
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) override;
  OwnedTensor gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args,
                         Begun* begun) override;
  CombineBackwardResult combine_backward(const Plan& plan,
                                         const CombineBackwardArgs& args) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) override;
  void agree_on(const Proposal& proposal) override { group().agree(proposal); }
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) override;
  void finish(const std::shared_ptr<const void>& /*done*/) override {}
  void set_options(const DeviceOptions& /*options*/) override {}
  void check() override {}

 private:
  /// Memory for rows [R, D] that peers may write.
  OwnedTensor take_rows(const char* operation, const Plan& plan, DType dtype) const;
  void scatter_tokens(const StrategyCall& strategy_call, std::span<const RowPart> parts,
                      const DispatchArgs& args, const DispatchResult& result);

  Group& group() const { return context_.group; }
  Strategy& strategy() const { return *context_.strategy; }

  PathContext context_;
};

}  // namespace crossdock
