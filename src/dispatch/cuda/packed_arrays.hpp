#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device_pool.hpp"

namespace crossdock::cuda {

/// Arrays packed into one block of device memory, each aligned to 16 bytes.
class PackedArrays {
 public:
  /// upload will set `place` to the array's address.
  template <typename T>
  void add(const std::vector<T>& values, const T*& place) {
    const size_t offset = bytes_.size();
    bytes_.resize((offset + values.size() * sizeof(T) + 15) / 16 * 16);
    if (!values.empty()) {
      std::memcpy(bytes_.data() + offset, values.data(), values.size() * sizeof(T));
    }
    settings_.push_back([offset, &place](const std::byte* memory) {
      place = reinterpret_cast<const T*>(memory + offset);
    });
  }

  /// Waits for the device, at most as long as the watch allows.
  Buffer upload(DevicePool& pool, cudaStream_t stream, StreamWatch& watch) const {
    Buffer memory = pool.take(std::ssize(bytes_), stream);
    if (!bytes_.empty()) {
      CROSSDOCK_CUDA(cudaMemcpyAsync(memory.data(), bytes_.data(), bytes_.size(),
                                     cudaMemcpyHostToDevice, stream));
      watch.await(stream);
    }
    for (const auto& set_place : settings_) set_place(memory.data());
    return memory;
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::function<void(const std::byte* memory)>> settings_;
};

}  // namespace crossdock::cuda
