#include <utility>

#include "crossdock/dispatcher.hpp"
#include "dispatch/device_path.hpp"

namespace crossdock {

template <typename Result>
Pending<Result> Dispatcher::begin(const Plan& plan, const std::function<Result()>& call) {
  const bool is_aside = device_path_ && plan.device_data();
  if (!is_aside) return {.result = call(), .done = nullptr};
  device_path_->begin_aside();
  Pending<Result> pending;
  try {
    pending.result = call();
  } catch (...) {
    device_path_->finish(device_path_->end_aside());
    throw;
  }
  pending.done = device_path_->end_aside();
  return pending;
}

template <typename Result>
Result Dispatcher::finish_call(Pending<Result>& pending) {
  if (pending.done) device_path_->finish(pending.done);
  return std::move(pending.result);
}

Pending<DispatchResult> Dispatcher::begin_dispatch(const Plan& plan, const DispatchArgs& args) {
  return begin<DispatchResult>(plan, [&] { return dispatch(plan, args); });
}

Pending<OwnedTensor> Dispatcher::begin_combine(const Plan& plan, ConstTensorView y,
                                               TensorView out) {
  return begin<OwnedTensor>(plan, [&] { return combine(plan, y, out); });
}

DispatchResult Dispatcher::finish(Pending<DispatchResult> pending) {
  return finish_call(pending);
}

OwnedTensor Dispatcher::finish(Pending<OwnedTensor> pending) {
  return finish_call(pending);
}

}  // namespace crossdock
