#include "cli/device/rank_device.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "crossdock/crossdock.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

OwnedTensor host_tensor(DType dtype, const Shape& shape) {
  const Buffer buffer(shape.num_elements() * size_of(dtype));
  return {buffer.view(dtype, shape), buffer.owner()};
}

class HostDevice final : public RankDevice {
 public:
  Device device() const override { return {}; }
  Stream stream() const override { return {}; }
  OwnedTensor allocate(DType dtype, const Shape& shape) override {
    return host_tensor(dtype, shape);
  }
  OwnedTensor to_device(const ConstTensorView& host) override {
    OwnedTensor copy = host_tensor(host.dtype, host.shape);
    read(host, copy.view);
    return copy;
  }
  void read(const ConstTensorView& tensor, const TensorView& host) override {
    if (tensor.num_bytes() == 0) return;
    std::memcpy(host.data, tensor.data, static_cast<size_t>(tensor.num_bytes()));
  }
  void wait() override {}
};

}  // namespace

void prepare_gpus() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  if (cuda_device_count() > 0) return;
  throw Error(ErrorCode::kUnsupported, missing_gpu());
}

std::string missing_gpu() {
  const auto features = describe_build().features;
  const auto cuda = std::ranges::find(features, std::string_view("cuda"), &Feature::name);
  const bool is_built = cuda != features.end() && cuda->is_built;
  return "--device cuda needs a GPU: " + cuda_missing_reason() +
         (is_built
              ? "; nvidia-smi shows what the driver sees"
              : "; build it with the CUDA 13 toolkit: CROSSDOCK_CUDA=on pip install ., a wheel "
                "of make wheels, or cmake -DCROSSDOCK_WITH_CUDA=ON");
}

std::string gpu_rule() {
  const int count = cuda_device_count();
  if (count == 0) return "no GPU here: " + cuda_missing_reason();
  if (count == 1) return "1 GPU here, which all ranks share";
  const std::string number = std::to_string(count);
  return number + " GPUs here; rank r of a node uses GPU r mod " + number;
}

OwnedTensor RankDevice::to_host(const ConstTensorView& tensor) {
  OwnedTensor copy = host_tensor(tensor.dtype, tensor.shape);
  if (tensor.device.is_cpu()) {
    HostDevice().read(tensor, copy.view);
  } else {
    read(tensor, copy.view);
  }
  return copy;
}

std::unique_ptr<RankDevice> make_host_device() {
  return std::make_unique<HostDevice>();
}

}  // namespace crossdock::cli
