#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "core/cuda/check.hpp"
#include "core/cuda/device_pool.hpp"

namespace crossdock::cuda {

/// Arrays one after the other, each at a multiple of 16 bytes; first on the host, then on a device.
class PackedArrays {
 public:
  /// Returns where the array will be.
  template <typename T>
  size_t add(const std::vector<T>& values) {
    const size_t offset = bytes_.size();
    bytes_.resize((offset + values.size() * sizeof(T) + 15) / 16 * 16);
    if (!values.empty()) {
      std::memcpy(bytes_.data() + offset, values.data(), values.size() * sizeof(T));
    }
    return offset;
  }

  /// Waits for the device.
  Buffer upload(DevicePool& pool, cudaStream_t stream) const {
    Buffer memory = pool.take(std::ssize(bytes_), stream);
    if (bytes_.empty()) return memory;
    CROSSDOCK_CUDA(cudaMemcpyAsync(memory.data(), bytes_.data(), bytes_.size(),
                                   cudaMemcpyHostToDevice, stream));
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream));
    return memory;
  }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace crossdock::cuda
