// Processes on one GPU, which map each other's memory (CUDA IPC). Compiled for each communicator of
// processes.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "comm/cuda/peer_memory.hpp"
#include "core/cuda/device_arena.hpp"
#include "crossdock/cuda.hpp"
#include "dispatch/cuda/captured_graph.hpp"
#include "support/process_communicator.hpp"

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
  Group group(testing::make_process_communicator(), deadlines());
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

// Memory of the ranks' results, mapped by their peers, is let go and taken again in every round.
TEST_F(CudaProcesses, CaptureAgainAfterTheResultsOfACaptureAreGone) {
  Group group(testing::make_process_communicator(), deadlines());
  for (unsigned round = 0; round < 4; ++round) {
    SCOPED_TRACE(round);
    const DispatchCase the_case = case_of(group, 71 + round);
    const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
    GpuRank rank(group, the_case, {});
    for (int capture = 0; capture < 3; ++capture) {
      SCOPED_TRACE(capture);
      { const QueuedStep warm(rank.dispatcher, rank.tensors); }
      rank.stream.synchronize();
      std::optional<QueuedStep> queued;
      const CapturedGraph graph(
          rank, [&] { queued.emplace(rank.dispatcher, rank.tensors); },
          cudaStreamCaptureModeGlobal);
      graph.launch();
      expect_same(queued->wait(rank.stream), wanted);
    }
    rank.dispatcher.check();
  }
}

// NCCL wants a GPU for every rank: processes on one GPU that take each other for other nodes cannot
// be connected. All of them say so, and go on.
TEST_F(CudaProcesses, OnOneGpuCannotBeConnectedByNccl) {
  Group group(testing::make_process_communicator(/*ranks_per_node=*/1), deadlines());
  const DispatchCase the_case = case_of(group, 75);
  for (const char* strategy : {"alltoall", "hierarchical"}) {
    GpuRank rank(group, the_case, {.strategy = strategy});
    const std::optional<Error> error = error_of([&] { rank.plan(); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kUnsupported) << error->what();
    EXPECT_NE(std::string(error->what()).find("NCCL"), std::string::npos) << error->what();
    group.check();
  }
  group.agree({.operation = "meet"});
}

cuda::MemoryHandle exchange(Group& group, const cuda::MemoryHandle& own, int whose) {
  const Agreement agreement =
      group.agree({.operation = "exchange", .body = std::as_bytes(std::span(&own, 1))});
  cuda::MemoryHandle handle;
  std::memcpy(&handle, agreement.body(whose).data(), sizeof(handle));
  return handle;
}

// Rank 0 lets memory go that rank 1 has mapped, takes memory again and writes there; rank 1 sees
// what was written.
TEST_F(CudaProcesses, SeeWhatIsWrittenIntoMemoryThatTheirPeerTakesAgain) {
  constexpr int64_t kBytes = int64_t{2} << 20;
  Group group(testing::make_process_communicator(), deadlines());
  const RankStream stream(group);
  const int device = stream.device().index;
  const auto arena = cuda::DeviceArena::make(device, /*is_exported=*/true);
  cuda::PeerMemory peers(group.communicator(), device);
  for (int round = 1; round <= 5; ++round) {
    const Buffer memory = cuda::allocate_device(*arena, kBytes);
    const std::vector<unsigned char> wanted(kBytes, static_cast<unsigned char>(round));
    if (group.rank() == 0) {
      cuda_ok(cudaMemsetAsync(memory.data(), round, kBytes, stream.get()));
      stream.synchronize();
    }
    const cuda::MemoryHandle own = peers.show(memory.data(), {memory.data(), kBytes});
    const std::byte* const there = peers.reach(0, exchange(group, own, 0));
    std::vector<unsigned char> seen(kBytes);
    cuda_ok(cudaMemcpyAsync(seen.data(), there, kBytes, cudaMemcpyDeviceToHost, stream.get()));
    stream.synchronize();
    EXPECT_TRUE(seen == wanted) << "round " << round << ", saw " << int{seen[0]};
    group.agree({.operation = "done"});
  }
}

}  // namespace
}  // namespace crossdock
