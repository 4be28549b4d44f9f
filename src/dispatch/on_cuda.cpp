#include <utility>

#include "crossdock/cuda.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "dispatch/device_path.hpp"

namespace crossdock {
namespace {

/// Runs host tensors on a GPU. The inner strategy moves what stays on the host.
class OnCuda final : public ForwardingStrategy {
 public:
  OnCuda(std::unique_ptr<Strategy> inner, int device)
      : ForwardingStrategy(std::move(inner)), device_(device) {}

  std::optional<Device> device_for_host_tensors() const override {
    return Device{.kind = DeviceKind::kCuda, .index = device_};
  }

  std::unique_ptr<Path> make_device_path(const PathContext& context, Device device) const override {
    return make_host_tensors_path(ForwardingStrategy::make_device_path(context, device),
                                  context.group, device);
  }

 private:
  int device_;
};

}  // namespace

std::unique_ptr<Strategy> on_cuda(std::unique_ptr<Strategy> strategy, int device) {
  return std::make_unique<OnCuda>(std::move(strategy), device);
}

}  // namespace crossdock
