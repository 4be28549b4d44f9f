#include "dispatch/path.hpp"

#include <utility>

#include "core/check.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "crossdock/extend/plan_data.hpp"

namespace crossdock {

void check_plan(const PathContext& context, const Plan& plan) {
  CROSSDOCK_CHECK(plan.valid(), "the plan is empty or closed; make one with Dispatcher::plan");
  CROSSDOCK_CHECK(plan.data().config == context.config,
                  "the plan was made by another dispatcher; use the one that made it");
}

Error no_cuda_error() {
  return {ErrorCode::kUnsupported, concat("this build has no CUDA (", cuda_missing_reason(),
                                          "); configure with CROSSDOCK_WITH_CUDA=ON")};
}

std::unique_ptr<Path> Strategy::make_device_path(const PathContext& /*context*/,
                                                 Device /*device*/) const {
  if (!cuda_is_built()) throw no_cuda_error();
  throw Error(ErrorCode::kUnsupported,
              concat("strategy \"", name(), "\" is not supported on GPUs"));
}

std::unique_ptr<Path> ForwardingStrategy::make_device_path(const PathContext& context,
                                                           Device device) const {
  return inner_->make_device_path(context, device);
}

namespace {

/// Runs calls with host tensors on a GPU. The inner strategy handles calls that stay on the host.
class OnCuda final : public ForwardingStrategy {
 public:
  OnCuda(std::unique_ptr<Strategy> inner, int device)
      : ForwardingStrategy(std::move(inner)), device_(device) {}

  std::optional<Device> device_for_host_tensors() const override {
    return Device{.kind = DeviceKind::kCuda, .index = device_};
  }

 private:
  int device_;
};

}  // namespace

std::unique_ptr<Strategy> on_cuda(std::unique_ptr<Strategy> strategy, int device) {
  return std::make_unique<OnCuda>(std::move(strategy), device);
}

}  // namespace crossdock
