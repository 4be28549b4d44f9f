#include <utility>

#include "crossdock/cuda.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"

namespace crossdock {
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
