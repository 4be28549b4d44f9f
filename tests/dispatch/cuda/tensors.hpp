#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "crossdock/cuda.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// Throws what a CUDA call says.
inline void cuda_ok(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// A test that is skipped where there is no GPU.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
    keep_freed_memory();
  }

 private:
  /// Else every wait for a stream gives memory back to the driver, while ranks wait for each other.
  static void keep_freed_memory() {
    cudaMemPool_t pool = nullptr;
    uint64_t all = UINT64_MAX;
    cuda_ok(cudaDeviceGetDefaultMemPool(&pool, 0));
    cuda_ok(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
  }
};

/// A stream of GPU 0 for one rank. Streams are used again: with more of them than the GPU has
/// queues, some share one and wait for each other in it.
class RankStream {
 public:
  RankStream() {
    const std::lock_guard lock(mutex());
    if (unused().empty()) {
      cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    } else {
      stream_ = unused().back();
      unused().pop_back();
    }
  }
  ~RankStream() {
    cudaStreamSynchronize(stream_);
    const std::lock_guard lock(mutex());
    unused().push_back(stream_);
  }
  RankStream(const RankStream&) = delete;
  RankStream& operator=(const RankStream&) = delete;

  cudaStream_t get() const { return stream_; }
  Stream view() const { return {stream_}; }
  void synchronize() const { cuda_ok(cudaStreamSynchronize(stream_)); }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::vector<cudaStream_t>& unused() {
    static std::vector<cudaStream_t> instance;
    return instance;
  }

  cudaStream_t stream_ = nullptr;
};

/// Memory of GPU 0 for a tensor, poisoned. Freed in the order of the stream: a plain cudaFree would
/// wait for kernels of other ranks.
inline OwnedTensor device_tensor(DType dtype, const Shape& shape, const RankStream& stream) {
  const int64_t num_bytes = shape.num_elements() * size_of(dtype);
  void* memory = nullptr;
  cuda_ok(cudaMallocAsync(&memory, static_cast<size_t>(num_bytes) + 1, stream.get()));
  cuda_ok(cudaMemsetAsync(memory, 0xff, static_cast<size_t>(num_bytes) + 1, stream.get()));
  const cudaStream_t handle = stream.get();
  const std::shared_ptr<void> owner(memory,
                                    [handle](void* pointer) { cudaFreeAsync(pointer, handle); });
  return {TensorView(memory, dtype, shape, {DeviceKind::kCuda, 0}), owner};
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
