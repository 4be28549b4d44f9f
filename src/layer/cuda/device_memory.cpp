#include "layer/device_memory.hpp"

#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"

namespace crossdock {
namespace {

class PooledMemory final : public DeviceMemory {
 public:
  explicit PooledMemory(Device device) : calls_(device.index) {}

  OwnedTensor take(DType dtype, const Shape& shape, Stream stream) override {
    return cuda::DeviceCall(calls_, stream).take(dtype, shape);
  }

  void fill(const TensorView& tensor, uint8_t value, Stream stream) override {
    const cuda::DeviceCall call(calls_, stream);
    CROSSDOCK_CUDA(cudaMemsetAsync(tensor.data, value, static_cast<size_t>(tensor.num_bytes()),
                                   call.handle()));
  }

  void copy(const ConstTensorView& from, const TensorView& to, Stream stream) override {
    const cuda::DeviceCall call(calls_, stream);
    CROSSDOCK_CUDA(cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(from.num_bytes()),
                                   cudaMemcpyDeviceToDevice, call.handle()));
  }

 private:
  cuda::DeviceCalls calls_;
};

}  // namespace

std::unique_ptr<DeviceMemory> make_device_memory(Device device) {
  return std::make_unique<PooledMemory>(device);
}

Stream stream_of_calls(Group& group, Stream stream) {
  return {cuda::group_stream(group, stream)};
}

bool is_captured(Stream stream, Device device) {
  const cuda::CallGuard guard(device.index);
  return cuda::is_capturing(cuda::handle_of(stream));
}

}  // namespace crossdock
