// A forward and its backward as one CUDA graph.
#include <gtest/gtest.h>

#include <algorithm>

#include "layer/cuda/layer_on_gpu.hpp"

namespace crossdock {
namespace {

class CudaLayerGraph : public CudaTest {};

// The same parameters with other tokens, which choose other experts.
LayerCase with_other_tokens(const LayerCase& layer_case, int64_t step) {
  LayerCase other = layer_case;
  const int64_t D = layer_case.config.router.width;
  const int64_t T = std::ssize(layer_case.x) / D;
  for (std::vector<double>* values : {&other.x, &other.grad_out}) {
    std::rotate(values->begin(), values->begin() + (step * 7 % T) * D, values->end());
    for (size_t i = static_cast<size_t>(step) % 5; i < values->size(); i += 5) {
      (*values)[i] = -(*values)[i];
    }
  }
  return other;
}

// A step of one rank as a graph, which owns its memory and results.
class StepGraph {
 public:
  explicit StepGraph(LayerOnGpu& gpu, Group& group) : gpu_(gpu) {
    gpu.run();  // connects the ranks and takes memory, which a capture cannot
    gpu.stream.synchronize();
    group.agree({.operation = "capture"});
    const cudaStream_t stream = gpu.stream.get();
    cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    forward_ = gpu.rank.forward();
    grad_x_ = gpu.rank.backward(forward_.saved);
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(stream, &graph));
    group.agree({.operation = "capture"});
    cuda_ok(cudaGraphInstantiate(&executable_, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
    cuda_ok(cudaGraphUpload(executable_, stream));
    gpu.stream.synchronize();
    group.agree({.operation = "captured"});
  }
  ~StepGraph() {
    cudaStreamSynchronize(gpu_.stream.get());
    cudaGraphExecDestroy(executable_);
  }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  RankResult replay() {
    cuda_ok(cudaGraphLaunch(executable_, gpu_.stream.get()));
    return gpu_.result(forward_, grad_x_);
  }

 private:
  LayerOnGpu& gpu_;
  MoeForwardResult forward_;
  OwnedTensor grad_x_;
  cudaGraphExec_t executable_ = nullptr;
};

// Every replay is bit-identical to a step without a graph and without overlapping chunks.
void expect_replays(const LayerCase& layer_case, int num_replays, int max_begun_sms = 0) {
  LayerCase in_one_piece = layer_case;
  in_one_piece.config.overlap_chunks = 1;
  run_ranks(layer_case.num_ranks(), [&](Group& group) {
    MoeLayerOptions options;
    options.device.max_begun_sms = max_begun_sms;
    LayerOnGpu captured(group, layer_case, kPoison, std::move(options));
    LayerOnGpu plain(group, in_one_piece);
    StepGraph graph(captured, group);
    for (int i = 0; i < num_replays; ++i) {
      const LayerCase other = with_other_tokens(layer_case, i);
      captured.copy_tokens(other, group.rank());
      plain.copy_tokens(other, group.rank());
      const RankResult got = graph.replay();
      const RankResult wanted = plain.run();
      ASSERT_EQ(find_difference(got, wanted, 0.0), "")
          << "replay " << i << ", rank " << group.rank();
    }
  });
}

TEST_F(CudaLayerGraph, ReplaysAThousandStepsWithOtherTokens) {
  expect_replays(medium_case(DType::kBF16), 1000);
}

TEST_F(CudaLayerGraph, ReplaysOnSeveralRanks) {
  expect_replays(spread(medium_case(DType::kBF16), {100, 111}), 50);
  expect_replays(spread(medium_case(DType::kF32), {0, 60, 150, 1}), 20);
}

TEST_F(CudaLayerGraph, ReplaysDispatchesInChunks) {
  LayerCase layer_case = medium_case(DType::kBF16);
  layer_case.config.overlap_chunks = 4;
  expect_replays(layer_case, 200);
  expect_replays(layer_case, 200, /*max_begun_sms=*/16);
  expect_replays(spread(layer_case, {100, 111}), 50, /*max_begun_sms=*/12);
  expect_replays(spread(layer_case, {0, 60, 150, 1}), 20);
}

TEST_F(CudaLayerGraph, ReplaysShardedExperts) {
  expect_replays(sharded_case(DType::kBF16, 2, {100, 111}), 50);
  LayerCase layer_case = sharded_case(DType::kBF16, 2, {0, 60, 150, 1});
  expect_replays(layer_case, 20);
  layer_case.config.overlap_chunks = 4;
  expect_replays(layer_case, 20);
  expect_replays(sharded_case(DType::kF32, 4, {0, 60, 150, 1}), 20);
}

TEST_F(CudaLayerGraph, NumbersCannotBeReadDuringACapture) {
  run_ranks(1, [&](Group& group) {
    const LayerCase layer_case = medium_case(DType::kBF16);
    LayerOnGpu gpu(group, layer_case);
    gpu.run();
    gpu.stream.synchronize();
    cuda_ok(cudaStreamBeginCapture(gpu.stream.get(), cudaStreamCaptureModeThreadLocal));
    const MoeForwardResult forward = gpu.rank.forward();
    EXPECT_THROW((void)forward.saved.decision.on_host(gpu.stream.view()), Error);
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(gpu.stream.get(), &graph));
    cuda_ok(cudaGraphDestroy(graph));
  });
}

}  // namespace
}  // namespace crossdock
