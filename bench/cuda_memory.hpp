#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "crossdock/tensor.hpp"

namespace crossdock::bench {

/// Throws Error(kCuda) with the message of a failed call.
void check_cuda(cudaError_t status, const std::string& call);

/// Makes a GPU current for the calling thread until the end of the scope.
class OnGpu {
 public:
  explicit OnGpu(int device);
  ~OnGpu();
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  int previous_ = 0;
};

/// The GPU of a stream.
int gpu_of(cudaStream_t stream);

/// Memory on the stream's GPU, freed in stream order.
OwnedTensor device_tensor(DType dtype, const Shape& shape, cudaStream_t stream);
OwnedTensor to_device(const ConstTensorView& host, cudaStream_t stream);
/// Copies the first num_rows rows to host memory. Waits for the stream.
OwnedTensor to_host(const ConstTensorView& tensor, int64_t num_rows, cudaStream_t stream);

/// bf16 numbers around 0: the first values of `random_values()`, repeated.
OwnedTensor random_tensor(const Shape& shape, cudaStream_t stream);
/// A fixed block of normally distributed numbers, rounded to bf16.
const std::vector<float>& random_values();

/// Reads 512 MiB on each GPU, which evicts everything else from its L2 cache.
class CacheFlush {
 public:
  /// One stream of each GPU.
  explicit CacheFlush(std::vector<cudaStream_t> streams);
  /// Queues the reads in the streams and waits for all but those in the first.
  void run() const;

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<OwnedTensor> memories_;  // one per stream
};

/// Bytes read and written per microsecond by a copy within device memory: the median of several
/// copies of 4 GiB of random data.
double measure_copy_bandwidth(cudaStream_t stream);

}  // namespace crossdock::bench
