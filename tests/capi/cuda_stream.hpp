#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "crossdock/cuda.hpp"

namespace crossdock::capi_test {

#define EXPECT_CUDA(call) EXPECT_EQ(call, cudaSuccess)

/// Selects a GPU for the thread of a rank, round robin; returns its index.
inline int select_gpu(int rank) {
  const int device = rank % cuda_device_count();
  EXPECT_CUDA(cudaSetDevice(device));
  return device;
}

/// A stream of the thread's GPU that does not wait for the default stream.
class Stream {
 public:
  Stream() { EXPECT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace crossdock::capi_test
