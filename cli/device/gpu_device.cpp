#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cli/device/rank_device.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kCuda, std::string(call) + ": " + cudaGetErrorString(status));
}

// Streams that no rank is using, by GPU. They are reused: if there were more streams than the GPU
// has queues, some would share a queue, and ranks would wait for each other in it.
class UnusedStreams {
 public:
  cudaStream_t take(int device) {
    const std::lock_guard lock(mutex_);
    std::vector<cudaStream_t>& unused = of_device_[device];
    cudaStream_t stream = nullptr;
    if (unused.empty()) {
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    } else {
      stream = unused.back();
      unused.pop_back();
    }
    return stream;
  }
  void give_back(int device, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    of_device_[device].push_back(stream);
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<cudaStream_t>> of_device_;
};

UnusedStreams& unused_streams() {
  static auto* const kStreams = new UnusedStreams;
  return *kStreams;
}

// Otherwise every wait for a stream returns freed memory to the driver, which waits for the whole
// GPU.
void keep_freed_memory(int device) {
  cudaMemPool_t pool = nullptr;
  uint64_t all = UINT64_MAX;
  check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all),
        "cudaMemPoolSetAttribute");
}

// Never waits for the whole GPU, where another rank may be waiting for this one: memory is
// allocated and freed in the order of the stream.
class GpuDevice final : public RankDevice {
 public:
  explicit GpuDevice(int index) : device_{.kind = DeviceKind::kCuda, .index = index} {
    check(cudaSetDevice(index), "cudaSetDevice");
    keep_freed_memory(index);
    stream_ = unused_streams().take(index);
  }
  ~GpuDevice() override {
    cudaStreamSynchronize(stream_);
    unused_streams().give_back(device_.index, stream_);
  }
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  Device device() const override { return device_; }
  Stream stream() const override { return {stream_}; }

  OwnedTensor allocate(DType dtype, const Shape& shape) override {
    const TensorView sizes(nullptr, dtype, shape);
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, static_cast<size_t>(sizes.num_bytes()) + 1, stream_),
          "cudaMallocAsync");
    const std::shared_ptr<void> owner(
        memory, [stream = stream_](void* pointer) { cudaFreeAsync(pointer, stream); });
    return {TensorView(memory, dtype, shape, device_), owner};
  }
  OwnedTensor to_device(const ConstTensorView& host) override {
    OwnedTensor copy = allocate(host.dtype, host.shape);
    transfer(copy.view.data, host.data, host.num_bytes(), cudaMemcpyHostToDevice);
    return copy;
  }
  void read(const ConstTensorView& tensor, const TensorView& host) override {
    transfer(host.data, tensor.data, tensor.num_bytes(), cudaMemcpyDeviceToHost);
  }
  void wait() override { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  // A copy queued behind kernels that wait for other ranks could keep those ranks from launching
  // their kernels.
  void transfer(void* to, const void* from, int64_t num_bytes, cudaMemcpyKind kind) {
    wait();
    if (num_bytes > 0) {
      check(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), kind, stream_),
            "cudaMemcpyAsync");
    }
    wait();
  }

  Device device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::vector<GpuInfo> list_gpus() {
  std::vector<GpuInfo> gpus;
  const int count = cuda_device_count();
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    GpuInfo gpu{.name = properties.name,
                .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem),
                .unreachable = {}};
    for (int other = 0; other < count; ++other) {
      int can_access = 1;
      if (other != device) {
        check(cudaDeviceCanAccessPeer(&can_access, device, other), "cudaDeviceCanAccessPeer");
      }
      if (can_access == 0) gpu.unreachable.push_back(other);
    }
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

std::unique_ptr<RankDevice> make_gpu_device(Group& group) {
  return std::make_unique<GpuDevice>(cuda_device_of(group));
}

}  // namespace crossdock::cli
