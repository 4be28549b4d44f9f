// Graph captures in global mode, PyTorch's default: no thread may make calls that could wait,
// unless it asks for an exception.

#include <gtest/gtest.h>

#include <future>
#include <optional>
#include <utility>

#include "crossdock/threads.hpp"
#include "dispatch/cuda/captured_graph.hpp"

namespace crossdock {
namespace {

using CudaCapture = CudaTest;

DispatchConfig config_with_room() {
  return {.num_experts = 9, .top_k = 2, .width = 72, .max_rows = 400};
}

// The dispatcher's first calls: kernels are loaded, memory is allocated, ranks connect.
TEST_F(CudaCapture, InGlobalModeMayHoldTheFirstCallsOfADispatcher) {
  const DispatchCase the_case = random_case(config_with_room(), {30, 50}, 60);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    rank.stream.synchronize();
    std::optional<QueuedStep> queued;
    const CapturedGraph graph(
        rank, [&] { queued.emplace(rank.dispatcher, rank.tensors); }, cudaStreamCaptureModeGlobal);
    for (int replay = 0; replay < 3; ++replay) {
      graph.launch();
      expect_same(queued->wait(rank.stream), wanted);
    }
    rank.dispatcher.check();
  });
}

// Begun calls have their own stream and channel.
TEST_F(CudaCapture, InGlobalModeMayHoldTheFirstBegunCall) {
  const DispatchCase the_case = random_case(config_with_room(), {30, 50}, 61);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    { const QueuedStep warm(rank.dispatcher, rank.tensors); }
    rank.stream.synchronize();
    std::optional<Plan> plan;
    DispatchResult moved;
    const auto step = [&] {
      plan = rank.plan();
      moved =
          rank.dispatcher.finish(rank.dispatcher.begin_dispatch(*plan, {.x = rank.tensors.x.view}));
    };
    const CapturedGraph graph(rank, step, cudaStreamCaptureModeGlobal);
    graph.launch();
    rank.stream.synchronize();
    EXPECT_EQ(to_host(moved.rows.view, plan->num_rows(), rank.stream), wanted.rows);
    rank.dispatcher.check();
  });
}

// A thread captures unrelated work while a group on another thread runs a whole step, which
// allocates, waits and copies to the host.
TEST_F(CudaCapture, InGlobalModeOnAnotherThreadDoesNotDisturbAStep) {
  DispatchConfig config = config_with_room();
  config.max_rows = {};
  const DispatchCase the_case = random_case(config, {30}, 62);
  for (const char* strategy : {"direct", "alltoall"}) {
    SCOPED_TRACE(strategy);
    run_on_gpu(the_case, {.strategy = strategy}, [&](GpuRank& rank, const StepBytes& wanted) {
      rank.stream.synchronize();
      const RankStream captured;
      cuda_ok(cudaStreamBeginCapture(captured.get(), cudaStreamCaptureModeGlobal));
      std::optional<QueuedStep> queued;
      int64_t num_rows = 0;
      std::async(std::launch::async, [&] {
        queued.emplace(rank.dispatcher, rank.tensors);
        num_rows = queued->plan.num_rows();
      }).get();
      cudaGraph_t graph = nullptr;
      EXPECT_EQ(cudaStreamEndCapture(captured.get(), &graph), cudaSuccess);
      if (graph != nullptr) cuda_ok(cudaGraphDestroy(graph));
      EXPECT_EQ(num_rows * the_case.config.width * size_of(DType::kF32), std::ssize(wanted.rows));
      expect_same(queued->wait(rank.stream), wanted);
    });
  }
}

}  // namespace
}  // namespace crossdock
