// Processes on one GPU, which map each other's memory. Compiled for each communicator of processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "comm/cuda/peer_memory.hpp"
#include "crossdock/cuda.hpp"
#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/sharing.hpp"
#include "support/process_communicator.hpp"

namespace crossdock {
namespace {

class CudaProcesses : public CudaSharing, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    share_by(GetParam());
    CudaSharing::SetUp();
  }
};

INSTANTIATE_TEST_SUITE_P(Sharing, CudaProcesses, ::testing::Values("fd", "ipc"),
                         [](const auto& info) { return std::string(info.param); });

DispatchCase case_of(const Group& group, unsigned seed) {
  const DispatchConfig config{.num_experts = 9, .top_k = 2, .width = 72, .max_rows = 400};
  return random_case(config, std::vector<int64_t>(static_cast<size_t>(group.size()), 40), seed);
}

// A capture takes new memory, which the peers map during the capture.
TEST_P(CudaProcesses, MapMemoryDuringACaptureInGlobalMode) {
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

// Memory of the ranks' results, mapped by their peers, is released and taken again in every round.
TEST_P(CudaProcesses, CaptureAgainAfterTheResultsOfACaptureAreGone) {
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

// The links and the partial sums are in memory that the peers map.
TEST_P(CudaProcesses, SendOneCopyPerRankAndPartialSums) {
  Group group(testing::make_process_communicator(), deadlines());
  DispatchCase the_case = case_of(group, 79);
  the_case.config.copies = Copies::kPerRank;
  the_case.config.partial_sums = PartialSums::kF32;
  for (const bool is_bounded : {true, false}) {
    if (!is_bounded) the_case.config.max_rows.reset();
    const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
    GpuRank rank(group, the_case, {});
    for (int i = 0; i < 2; ++i) {
      const QueuedStep step(rank.dispatcher, rank.tensors);
      expect_same(step.wait(rank.stream), wanted);
    }
    rank.dispatcher.check();
  }
}

// NCCL needs a GPU for every rank: it cannot connect processes on one GPU that appear to be on
// different nodes. All of them report this and continue.
TEST_P(CudaProcesses, OnOneGpuCannotBeConnectedByNccl) {
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

// Rank 0 releases memory that the others have mapped, takes memory again and writes to it; the
// others see the new values.
TEST_P(CudaProcesses, SeeWhatIsWrittenIntoMemoryThatTheirPeerTakesAgain) {
  constexpr int64_t kBytes = int64_t{2} << 20;
  Group group(testing::make_process_communicator(), deadlines());
  const RankStream stream(group);
  const int device = stream.device().index;
  cuda::PeerMemory peers(group.communicator(), device);
  peers.share_memory(group, {});
  const auto arena = cuda::DeviceArena::make(device, peers.sharing());
  for (int round = 1; round <= 5; ++round) {
    const Buffer memory = cuda::allocate_device(*arena, kBytes);
    if (group.rank() == 0) {
      cuda_ok(cudaMemsetAsync(memory.data(), round, kBytes, stream.get()));
      stream.synchronize();
    }
    const auto seen = read(reach_first_rank(group, peers, memory), kBytes, stream);
    EXPECT_EQ(std::ranges::count(seen, round), kBytes) << "round " << round;
    group.agree({.operation = "done"});
  }
}

// More and more memory, of all sizes: the arena of every rank grows several times.
TEST_P(CudaProcesses, SeeMemoryOfAllSizesWhileTheirArenasGrow) {
  Group group(testing::make_process_communicator(), deadlines());
  const RankStream stream(group);
  const int device = stream.device().index;
  cuda::PeerMemory peers(group.communicator(), device);
  peers.share_memory(group, {});
  const auto arena = cuda::DeviceArena::make(device, peers.sharing());
  std::vector<Buffer> kept;
  std::vector<const std::byte*> there;
  for (int i = 0; i < 20; ++i) {
    const int64_t num_bytes = (int64_t{1} << (i + 8)) + 3 * i;  // up to 128 MiB
    kept.push_back(cuda::allocate_device(*arena, num_bytes));
    cuda_ok(
        cudaMemsetAsync(kept.back().data(), i + 1, static_cast<size_t>(num_bytes), stream.get()));
    stream.synchronize();
    there.push_back(reach_first_rank(group, peers, kept.back()));
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    const auto seen = read(there[i], kept[i].num_bytes(), stream);
    EXPECT_EQ(std::ranges::count(seen, static_cast<unsigned char>(i + 1)), std::ssize(seen));
  }
  group.agree({.operation = "done"});
}

// Steps of all sizes in one dispatcher, whose memory grows meanwhile.
TEST_P(CudaProcesses, MakeStepsOfAnySizeWithOneDispatcher) {
  Group group(testing::make_process_communicator(), deadlines());
  const DispatchConfig config{.num_experts = 9, .top_k = 2, .width = 520};
  std::optional<GpuRank> rank;
  for (const int64_t T : {1, 3000, 0, 6000, 70, 12000, 12000}) {
    SCOPED_TRACE(T);
    const std::vector<int64_t> tokens(static_cast<size_t>(group.size()), T);
    const DispatchCase the_case = random_case(config, tokens, 80);
    const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
    if (!rank) rank.emplace(group, the_case, GpuSetting{});
    const auto r = static_cast<size_t>(group.rank());
    const DeviceTensors tensors(tensors_of(config, the_case.ranks[r], DType::kF32), rank->stream);
    const QueuedStep step(rank->dispatcher, tensors);
    expect_same(step.wait(rank->stream), wanted);
  }
  rank->dispatcher.check();
}

// A rank leaves; the remaining ranks reach each other as before.
TEST_P(CudaProcesses, GoOnWithoutAPeerThatLeaves) {
  Group group(testing::make_process_communicator(), deadlines());
  const DispatchCase the_case = case_of(group, 76);
  GpuRank rank(group, the_case, {});
  { const QueuedStep step(rank.dispatcher, rank.tensors); }
  rank.stream.synchronize();
  const int leaving = group.size() - 1;
  if (group.rank() == leaving) {
    group.leave("it has had enough");
    return;
  }
  const std::optional<Error> error = error_of([&] {
    const Plan plan = rank.plan();
    rank.stream.synchronize();  // a rank that has run ahead finds out on its device
    rank.dispatcher.check();
  });
  EXPECT_TRUE(error.has_value());
  std::vector<int> members(static_cast<size_t>(leaving));
  std::iota(members.begin(), members.end(), 0);
  const std::unique_ptr<Group> rest = group.subgroup(members);
  const DispatchCase smaller = case_of(*rest, 77);
  const StepBytes wanted = cpu_step(*rest, smaller, DType::kF32);
  GpuRank survivor(*rest, smaller, {});
  const QueuedStep step(survivor.dispatcher, survivor.tensors);
  expect_same(step.wait(survivor.stream), wanted);
}

// The kinds of sharing that a group has tried.
std::vector<std::string> sharing_of(Group& group) {
  std::vector<std::string> kinds;
  for (const Event& event : group.recorder().events()) {
    const std::string phase = event.phase;
    if (phase.starts_with("memory by ")) kinds.push_back(phase.substr(10));
  }
  return kinds;
}

void expect_a_correct_step(Group& group, unsigned seed) {
  const DispatchCase the_case = case_of(group, seed);
  const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
  GpuRank rank(group, the_case, {});
  const QueuedStep step(rank.dispatcher, rank.tensors);
  expect_same(step.wait(rank.stream), wanted);
}

TEST_F(CudaSharing, IsByDescriptorsUnlessARankCannot) {
  Group group(testing::make_process_communicator(), deadlines());
  expect_a_correct_step(group, 90);
  EXPECT_EQ(sharing_of(group), std::vector<std::string>{"descriptor"});
  comm::gpu_pretences_of(group).shares_no_arenas = group.rank() == 1;
  expect_a_correct_step(group, 91);
  comm::gpu_pretences_of(group) = {};
  EXPECT_EQ(sharing_of(group),
            (std::vector<std::string>{"descriptor", "descriptor", "fabric", "ipc"}));
  expect_a_correct_step(group, 92);
}

TEST_F(CudaSharing, IsAnErrorOnAllRanksIfOneCannotShareAsTheSettingDemands) {
  Group group(testing::make_process_communicator(), deadlines());
  share_by("fd");
  comm::gpu_pretences_of(group).shares_no_arenas = group.rank() == 1;
  const std::string message =
      message_of([&] { expect_a_correct_step(group, 93); }, ErrorCode::kUnsupported);
  EXPECT_NE(message.find("CROSSDOCK_PEER_MEMORY=fd"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 1: "), std::string::npos) << message;
  comm::gpu_pretences_of(group) = {};
  expect_a_correct_step(group, 94);  // the group stays usable
}

TEST_F(CudaSharing, SettingsMustBeIdenticalAndValid) {
  Group group(testing::make_process_communicator(), deadlines());
  share_by(group.rank() == 1 ? "ipc" : "fd");
  EXPECT_NE(message_of([&] { expect_a_correct_step(group, 95); }, ErrorCode::kMismatch)
                .find("peer_memory"),
            std::string::npos);
  share_by(group.rank() == 1 ? "floppy" : "fd");
  EXPECT_NE(message_of([&] { expect_a_correct_step(group, 96); }, ErrorCode::kInvalidArgument)
                .find("got 'floppy'"),
            std::string::npos);
  share_by("fd");
  expect_a_correct_step(group, 97);
}

TEST_F(CudaSharing, IsNotTriedWhereGpusDoNotReachEachOther) {
  share_by("fd");
  Group group(testing::make_process_communicator(), deadlines());
  comm::gpu_pretences_of(group) = {.reaches_nobody = true, .shares_no_arenas = true};
  expect_a_correct_step(group, 98);
  EXPECT_TRUE(sharing_of(group).empty());
}

}  // namespace
}  // namespace crossdock
