#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "core/cuda/device_arena.hpp"

namespace crossdock::ops {

/// Device memory that product kernels use besides their tensors. Kernels that may run at the same
/// time use different memory: every stream has its own, and so does every captured graph, whose
/// replays may overlap with other work of the stream. Thread-safe.
///
/// It is never freed: kernels may still run when the object that launched them is gone.
class ProductScratch {
 public:
  /// The instance of a device, for all products of this process.
  static ProductScratch& of(int device);
  ProductScratch(const ProductScratch&) = delete;
  ProductScratch& operator=(const ProductScratch&) = delete;

  struct Memory {
    int32_t* counters;  // [2], zero; kernels leave them zero
    std::byte* bytes;   // unspecified contents, 256-byte aligned
  };
  /// Memory for the stream's next kernels, at least num_bytes bytes. Allocates when a stream or a
  /// capture is new or needs more than before; waits for the allocation, not for kernels.
  Memory take(cudaStream_t stream, int64_t num_bytes);

 private:
  explicit ProductScratch(int device);

  struct Entry {
    Buffer counters;
    std::vector<Buffer> bytes;  // the last one is in use; kernels in flight may use the others
  };
  // The last member distinguishes threads for cudaStreamPerThread.
  using Key = std::tuple<cudaStream_t, uint64_t, std::thread::id>;

  std::shared_ptr<cuda::DeviceArena> arena_;
  std::mutex mutex_;
  std::map<Key, Entry> entries_;
};

}  // namespace crossdock::ops
