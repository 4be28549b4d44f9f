// MPI processes on one GPU, which map each other's memory (CUDA IPC).

#include <gtest/gtest.h>

#include <optional>

#include "crossdock/cuda.hpp"
#include "crossdock/mpi.hpp"
#include "dispatch/cuda_captured_graph.hpp"

namespace crossdock {
namespace {

using CudaProcesses = CudaTest;

GroupOptions deadlines() {
  return short_deadlines().group;
}

DispatchCase case_of(const Group& group, unsigned seed) {
  const DispatchConfig config{.num_experts = 9, .top_k = 2, .width = 72, .max_rows = 400};
  return random_case(config, std::vector<int64_t>(static_cast<size_t>(group.size()), 40), seed);
}

// What a capture takes is new memory, which the peers map during the capture.
TEST_F(CudaProcesses, MapMemoryDuringACaptureInGlobalMode) {
  Group group(make_mpi_communicator(), deadlines());
  const DispatchCase the_case = case_of(group, 70);
  const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
  GpuRank rank(group, the_case, {});
  { const QueuedStep warm(rank.dispatcher, rank.tensors); }
  rank.stream.synchronize();
  std::optional<QueuedStep> queued;
  const CapturedGraph graph(
      rank, [&] { queued.emplace(rank.dispatcher, rank.tensors); }, cudaStreamCaptureModeGlobal);
  for (int replay = 0; replay < 2; ++replay) {
    graph.launch();
    expect_same(queued->wait(rank.stream), wanted);
  }
  rank.dispatcher.check();
}

}  // namespace
}  // namespace crossdock
