#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "crossdock/cuda.hpp"
#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// Throws if a CUDA call failed.
inline void cuda_ok(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// A test that is skipped without a GPU.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
    keep_freed_memory();
  }

 private:
  /// Otherwise every wait for a stream returns memory to the driver while ranks wait for others.
  static void keep_freed_memory() {
    for (int device = 0; device < cuda_device_count(); ++device) {
      cudaMemPool_t pool = nullptr;
      uint64_t all = UINT64_MAX;
      cuda_ok(cudaDeviceGetDefaultMemPool(&pool, device));
      cuda_ok(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
    }
  }
};

/// The GPU that calls of this thread use.
inline int current_gpu() {
  int device = 0;
  cuda_ok(cudaGetDevice(&device));
  return device;
}

/// A stream for one rank. Streams are reused: with more streams than the GPU has queues, some would
/// share a queue and wait for each other in it.
class RankStream {
 public:
  /// On the GPU of the group's rank, which becomes the calling thread's GPU: ranks use all
  /// available GPUs, round robin.
  explicit RankStream(Group& group) : RankStream(select_gpu(cuda_device_of(group))) {}
  /// On the thread's current GPU.
  RankStream() : RankStream(current_gpu()) {}
  ~RankStream() {
    cudaStreamSynchronize(stream_);
    const std::lock_guard lock(mutex());
    unused()[device_].push_back(stream_);
  }
  RankStream(const RankStream&) = delete;
  RankStream& operator=(const RankStream&) = delete;

  cudaStream_t get() const { return stream_; }
  Stream view() const { return {stream_}; }
  Device device() const { return {.kind = DeviceKind::kCuda, .index = device_}; }
  void synchronize() const { cuda_ok(cudaStreamSynchronize(stream_)); }

 private:
  static int select_gpu(int device) {
    cuda_ok(cudaSetDevice(device));
    return device;
  }
  explicit RankStream(int device) : device_(device) {
    const std::lock_guard lock(mutex());
    if (unused()[device].empty()) {
      cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    } else {
      stream_ = unused()[device].back();
      unused()[device].pop_back();
    }
  }
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::map<int, std::vector<cudaStream_t>>& unused() {
    static std::map<int, std::vector<cudaStream_t>> by_device;
    return by_device;
  }

  int device_;
  cudaStream_t stream_ = nullptr;
};

/// Memory for a tensor on the stream's GPU, poisoned. Freed in the order of the stream: a plain
/// cudaFree would wait for kernels of other ranks.
inline OwnedTensor device_tensor(DType dtype, const Shape& shape, const RankStream& stream) {
  const int64_t num_bytes = shape.num_elements() * size_of(dtype);
  void* memory = nullptr;
  cuda_ok(cudaMallocAsync(&memory, static_cast<size_t>(num_bytes) + 1, stream.get()));
  cuda_ok(cudaMemsetAsync(memory, 0xff, static_cast<size_t>(num_bytes) + 1, stream.get()));
  const cudaStream_t handle = stream.get();
  const std::shared_ptr<void> owner(memory,
                                    [handle](void* pointer) { cudaFreeAsync(pointer, handle); });
  return {TensorView(memory, dtype, shape, stream.device()), owner};
}

inline OwnedTensor to_device(const ConstTensorView& host, const RankStream& stream) {
  OwnedTensor copy = device_tensor(host.dtype, host.shape, stream);
  cuda_ok(cudaMemcpyAsync(copy.view.data, host.data, static_cast<size_t>(host.num_bytes()),
                          cudaMemcpyHostToDevice, stream.get()));
  return copy;
}

/// The first num_rows rows, as bytes. Waits for the stream.
inline std::vector<std::byte> to_host(const ConstTensorView& tensor, int64_t num_rows,
                                      const RankStream& stream) {
  std::vector<std::byte> bytes(static_cast<size_t>(num_rows * tensor.row_bytes()));
  stream
      .synchronize();  // a copy that waits for kernels could keep other ranks from launching theirs
  cuda_ok(cudaMemcpyAsync(bytes.data(), tensor.data, bytes.size(), cudaMemcpyDeviceToHost,
                          stream.get()));
  stream.synchronize();
  return bytes;
}

inline std::vector<std::byte> to_host(const ConstTensorView& tensor, const RankStream& stream) {
  return to_host(tensor, tensor.num_rows(), stream);
}

inline std::vector<std::byte> bytes_of(const ConstTensorView& host) {
  const auto* data = static_cast<const std::byte*>(host.data);
  return {data, data + host.num_bytes()};
}

}  // namespace crossdock
