#include "cli/device/tensor_place.hpp"

#include "cli/device/rank_device.hpp"

namespace crossdock::cli {

conformance::MakePlace tensor_places(const std::string& device) {
  if (device != "cuda") return {};
  return [](Group& group) -> conformance::TensorPlace {
    const std::shared_ptr<RankDevice> gpu = make_gpu_device(group);
    return {.to_device = [gpu](const ConstTensorView& host) { return gpu->to_device(host); },
            .to_host = [gpu](const ConstTensorView& tensor) { return gpu->to_host(tensor); },
            .device = gpu->device(),
            .stream = gpu->stream()};
  };
}

}  // namespace crossdock::cli
