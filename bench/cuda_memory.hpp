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

/// Device memory of GPU 0, freed in stream order.
OwnedTensor device_tensor(DType dtype, const Shape& shape, cudaStream_t stream);
OwnedTensor to_device(const ConstTensorView& host, cudaStream_t stream);
/// Copies the first num_rows rows to host memory. Waits for the stream.
OwnedTensor to_host(const ConstTensorView& tensor, int64_t num_rows, cudaStream_t stream);

/// bf16 numbers around 0: the first values of `random_values()`, repeated.
OwnedTensor random_tensor(const Shape& shape, cudaStream_t stream);
/// A fixed block of normally distributed numbers, rounded to bf16.
const std::vector<float>& random_values();

/// Reads 512 MiB, which evicts everything else from the L2 cache.
class CacheFlush {
 public:
  explicit CacheFlush(cudaStream_t stream);
  void queue(cudaStream_t stream) const;

 private:
  OwnedTensor memory_;
};

/// Bytes read and written per microsecond by a copy within device memory: the median of several
/// copies of 4 GiB of random data.
double measure_copy_bandwidth(cudaStream_t stream);

}  // namespace crossdock::bench
