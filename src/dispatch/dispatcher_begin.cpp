#include <utility>

#include "comm/agreed_failure.hpp"
#include "crossdock/dispatcher.hpp"
#include "dispatch/device_path.hpp"

namespace crossdock {

template <typename Result>
Pending<Result> Dispatcher::begin(const char* operation, const Plan& plan,
                                  const std::function<Result()>& call) {
  const bool is_aside = device_path_ && plan.device_data();
  if (!is_aside) return {.result = call(), .done = nullptr};
  const std::optional<Error> refusal = refusal_of([&] { device_path_->begin_aside(); });
  if (refusal) agree(operation, plan, {}, refusal);  // throws on all ranks
  Pending<Result> pending{.result = {}, .done = nullptr, .plan = plan};
  try {
    pending.result = call();
  } catch (...) {
    device_path_->finish(device_path_->end_aside());
    throw;
  }
  run_agreed(group_, [&] { pending.done = device_path_->end_aside(); });
  return pending;
}

template <typename Result>
Result Dispatcher::finish_call(Pending<Result>& pending) {
  if (pending.done) device_path_->finish(pending.done);
  return std::move(pending.result);
}

Pending<DispatchResult> Dispatcher::begin_dispatch(const Plan& plan, const DispatchArgs& args) {
  return begin<DispatchResult>("dispatch", plan, [&] { return dispatch(plan, args); });
}

Pending<OwnedTensor> Dispatcher::begin_combine(const Plan& plan, ConstTensorView y,
                                               TensorView out) {
  return begin<OwnedTensor>("combine", plan, [&] { return combine(plan, y, out); });
}

DispatchResult Dispatcher::finish(Pending<DispatchResult> pending) {
  return finish_call(pending);
}

OwnedTensor Dispatcher::finish(Pending<OwnedTensor> pending) {
  return finish_call(pending);
}

}  // namespace crossdock
