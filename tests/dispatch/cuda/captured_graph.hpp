#pragma once

#include <cuda_runtime.h>

#include "dispatch/cuda/step.hpp"

namespace crossdock {

/// The work that one rank queued, as a graph. Making it is collective: a launched graph waits for
/// those of the other ranks, and making one may wait for the device.
class CapturedGraph {
 public:
  template <typename Body>
  CapturedGraph(const GpuRank& rank, const Body& body,
                cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal)
      : stream_(rank.stream.get()) {
    // During a capture in global mode the other ranks may not do what they do before and after it.
    rank.group.agree({.operation = "capture"});
    cuda_ok(cudaStreamBeginCapture(stream_, mode));
    body();
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(stream_, &graph));
    rank.group.agree({.operation = "capture"});
    cuda_ok(cudaGraphInstantiate(&executable_, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
    cuda_ok(cudaGraphUpload(executable_, stream_));
    rank.stream.synchronize();
    rank.group.agree({.operation = "captured"});
  }
  ~CapturedGraph() { cudaGraphExecDestroy(executable_); }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void launch() const { cuda_ok(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace crossdock
