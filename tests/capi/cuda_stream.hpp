#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace crossdock::capi_test {

#define EXPECT_CUDA(call) EXPECT_EQ(call, cudaSuccess)

/// A stream of GPU 0 that does not wait for the default stream.
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
