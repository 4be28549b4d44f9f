#pragma once

#include <memory>
#include <string_view>

#include "crossdock/dispatcher.hpp"
#include "crossdock/testing/tensor_place.hpp"

namespace crossdock::conformance {

/// A dispatcher for checks, which have their tensors in host memory. If its strategy is made by
/// on_device, every call copies them to the device and the results back; its plans have copies of
/// the arrays in host memory. Otherwise its members are those of Dispatcher.
class PlacedDispatcher {
 public:
  PlacedDispatcher(Group& group, DispatchConfig config, std::unique_ptr<Strategy> strategy);
  PlacedDispatcher(Group& group, DispatchConfig config, std::string_view strategy_name,
                   const StrategyList& candidates = built_in_strategies());

  const DispatchConfig& config() const { return dispatcher_.config(); }
  Group& group() { return dispatcher_.group(); }
  const Strategy& strategy() const { return dispatcher_.strategy(); }
  /// For calls that never copy. REQUIRES: !is_copied(plan) for their plan.
  Dispatcher& on_host() { return dispatcher_; }
  /// Whether calls with this plan copy their tensors.
  static bool is_copied(const Plan& plan);

  [[nodiscard]] Plan plan(const Routing& routing);
  [[nodiscard]] Plan plan(const DenseRouting& routing);
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args);
  OwnedTensor combine(const Plan& plan, ConstTensorView y, TensorView out = {});
  OwnedTensor combine_unweighted(const Plan& plan, ConstTensorView y, TensorView out = {});
  OwnedTensor dispatch_backward(const Plan& plan, ConstTensorView grad_rows,
                                TensorView grad_x = {});
  CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                         ConstTensorView y) {
    return combine_backward(plan, {.grad_out = grad_out, .y = y});
  }
  CombineBackwardResult combine_backward(const Plan& plan, const CombineBackwardArgs& args);
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes = {});
  [[nodiscard]] OwnedTensor allocate_rows(const Plan& plan, DType dtype);

 private:
  template <typename AnyRouting>
  Plan plan_there(const ConstTensorView& routes, const AnyRouting& routing);
  template <typename Call>
  OwnedTensor sum_there(const Plan& plan, const ConstTensorView& rows, const TensorView& out,
                        const Call& call);
  template <typename Copies>
  void copy(const Copies& copies);
  OwnedTensor upload(const ConstTensorView& tensor) const;
  OwnedTensor upload_rows(const Plan& plan, const ConstTensorView& rows) const;
  OwnedTensor download(const ConstTensorView& tensor, int64_t num_rows,
                       const TensorView& given) const;
  void find_place();

  TensorPlace place_;
  Dispatcher dispatcher_;
};

}  // namespace crossdock::conformance
