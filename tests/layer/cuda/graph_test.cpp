// A forward and its backward as one CUDA graph.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>

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

struct ReplayOptions {
  int max_begun_sms = 0;
  /// Sets groups of the layers, given the rank's neighbours: ranks 0 and 1, or 2 and 3.
  std::function<void(Group& pair, MoeLayerOptions& options)> set_groups = nullptr;
  bool same_tokens = false;  // all ranks have those of rank 0
};

// Every replay is bit-identical to a step without a graph and without overlapping chunks.
void expect_replays(const LayerCase& layer_case, int num_replays, const ReplayOptions& replays) {
  LayerCase in_one_piece = layer_case;
  in_one_piece.config.overlap_chunks = 1;
  run_ranks(layer_case.num_ranks(), [&](Group& group) {
    const int first = group.rank() / 2 * 2;
    const std::unique_ptr<Group> pair =
        replays.set_groups ? group.subgroup(std::vector<int>{first, first + 1}) : nullptr;
    const int token_rank = replays.same_tokens ? 0 : group.rank();
    const auto make = [&](const LayerCase& made, int max_begun_sms) {
      MoeLayerOptions options;
      options.device.max_begun_sms = max_begun_sms;
      if (replays.set_groups) replays.set_groups(*pair, options);
      return std::make_unique<LayerOnGpu>(group, made, kPoison, std::move(options), token_rank);
    };
    const std::unique_ptr<LayerOnGpu> captured = make(layer_case, replays.max_begun_sms);
    const std::unique_ptr<LayerOnGpu> plain = make(in_one_piece, 0);
    StepGraph graph(*captured, group);
    for (int i = 0; i < num_replays; ++i) {
      const LayerCase other = with_other_tokens(layer_case, i);
      captured->copy_tokens(other, token_rank);
      plain->copy_tokens(other, token_rank);
      const RankResult got = graph.replay();
      const RankResult wanted = plain->run();
      ASSERT_EQ(find_difference(got, wanted, 0.0), "")
          << "replay " << i << ", rank " << group.rank();
    }
  });
}

void expect_replays(const LayerCase& layer_case, int num_replays, int max_begun_sms = 0) {
  expect_replays(layer_case, num_replays, ReplayOptions{.max_begun_sms = max_begun_sms});
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

// A graph uses plans of calls before it, which a call that fails must leave alone.
TEST_F(CudaLayerGraph, ReplaysAfterACallWasRefused) {
  const LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
  run_ranks(2, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case);
    StepGraph graph(gpu, group);
    const RankResult wanted = graph.replay();
    MoeForwardArgs wrong = gpu.rank.forward_args();
    wrong.weights.gate.weight = {};
    expect_refused(group, "the gate must be", [&] { (void)gpu.rank.layer.forward(wrong); });
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(find_difference(gpu.run(), wanted, 0.0), "");
      group.agree({.operation = "replay"});
      EXPECT_EQ(find_difference(graph.replay(), wanted, 0.0), "");
    }
  });
}

TEST_F(CudaLayerGraph, ReplaysShardedExperts) {
  expect_replays(sharded_case(DType::kBF16, 2, {100, 111}), 50);
  LayerCase layer_case = sharded_case(DType::kBF16, 2, {0, 60, 150, 1});
  expect_replays(layer_case, 20);
  layer_case.config.overlap_chunks = 4;
  expect_replays(layer_case, 20);
  expect_replays(sharded_case(DType::kF32, 4, {0, 60, 150, 1}), 20);
}

TEST_F(CudaLayerGraph, ReplaysCountsOverOtherGroups) {
  expect_replays(spread(medium_case(DType::kF32), {0, 60, 150, 1}), 20,
                 ReplayOptions{.set_groups = [](Group& pair, MoeLayerOptions& options) {
                   options.counting_group = &pair;
                 }});
}

TEST_F(CudaLayerGraph, ReplaysReplicatedTokens) {
  expect_replays(
      spread(medium_case(DType::kBF16), {100, 111}), 20,
      ReplayOptions{.set_groups = [](Group& pair,
                                     MoeLayerOptions& options) { options.replicated_over = &pair; },
                    .same_tokens = true});
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
