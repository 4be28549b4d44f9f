#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "dispatch/cuda/tensors.hpp"
#include "experts/expert_case.hpp"

namespace crossdock {

/// All tensors of a case, copied to GPU 0.
inline ExpertTensors to_device(const ExpertTensors& host, const RankStream& stream) {
  ExpertTensors device = host;
  for (OwnedTensor* tensor : device.all()) {
    if (tensor->view.given()) *tensor = to_device(ConstTensorView(tensor->view), stream);
  }
  device.stream = stream.view();
  return device;
}

/// Copies the tensors of another case with the same shapes into the same memory.
inline void copy_into(ExpertTensors& device, ExpertTensors host, const RankStream& stream) {
  const std::vector<OwnedTensor*> from = host.all();
  const std::vector<OwnedTensor*> to = device.all();
  for (size_t i = 0; i < from.size(); ++i) {
    cuda_ok(cudaMemcpyAsync(to[i]->view.data, from[i]->view.data,
                            static_cast<size_t>(from[i]->view.num_bytes()), cudaMemcpyHostToDevice,
                            stream.get()));
  }
  stream.synchronize();
}

/// The outputs. Waits for the stream.
inline ExpertResult result_of(const ExpertTensors& device, const RankStream& stream) {
  ExpertTensors host = device;
  for (OwnedTensor* tensor : {&host.y, &host.grad_rows, &host.grad_row_weights, &host.grad_w1,
                              &host.grad_w2, &host.grad_b1, &host.grad_b2}) {
    auto bytes = std::make_shared<std::vector<std::byte>>(to_host(tensor->view, stream));
    tensor->view = TensorView(bytes->data(), tensor->view.dtype, tensor->view.shape);
    tensor->owner = bytes;
  }
  return host.result();
}

/// Forward, backward_dx and backward_dw on GPU 0.
inline ExpertResult run_on_gpu(const ExpertCase& test, const RunOptions& options = {}) {
  const RankStream stream;
  const ExpertTensors tensors = to_device(ExpertTensors(test, options.initial_gradient), stream);
  run_step(Experts(test.config), tensors, options.accumulate);
  return result_of(tensors, stream);
}

/// A case whose tensors have R rows.
inline ExpertCase case_of(const ExpertsConfig& config, const std::vector<int64_t>& counts,
                          int64_t R, bool with_bias = true) {
  constexpr int64_t kAlignment = 4;
  int64_t used = 0;
  for (const int64_t count : counts) used += (count + kAlignment - 1) / kAlignment * kAlignment;
  return {config, counts, with_bias, kAlignment, R - used};
}

/// The work that a call queued, as a graph.
class QueuedGraph {
 public:
  template <typename Body>
  QueuedGraph(const RankStream& stream, const Body& body) : stream_(stream.get()) {
    cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    body();
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(stream_, &graph));
    cuda_ok(cudaGraphInstantiate(&executable_, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
  }
  ~QueuedGraph() { cudaGraphExecDestroy(executable_); }
  QueuedGraph(const QueuedGraph&) = delete;
  QueuedGraph& operator=(const QueuedGraph&) = delete;

  void launch() const { cuda_ok(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace crossdock
