// Rows through NCCL. It wants a GPU for every rank: with one GPU one rank sends to itself, and what
// is checked of a communicator is checked.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/cuda/step.hpp"
#include "dispatch/lone_communicator.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaNccl = CudaTest;

DispatchCase case_of(const std::vector<int64_t>& tokens_per_rank) {
  return random_case({.num_experts = 5, .top_k = 2, .width = 24}, tokens_per_rank, 60);
}

const char* const kStrategies[] = {"alltoall", "allgather"};

#if CROSSDOCK_HAS_NCCL

TEST_F(CudaNccl, BringsTheRowsOfOneRankHome) {
  const LoneCommunicator comm;
  for (const char* strategy : kStrategies) {
    const GpuSetting setting{
        .dtype = DType::kBF16, .options = {.nccl_comm = comm.get()}, .strategy = strategy};
    run_on_gpu(case_of({33}), setting, [&](GpuRank& rank, const StepBytes& wanted) {
      for (int step = 0; step < 2; ++step) {
        const QueuedStep queued(rank.dispatcher, rank.tensors);
        expect_same(queued.wait(rank.stream), wanted);
      }
      rank.dispatcher.check();
    });
  }
}

TEST_F(CudaNccl, ACommunicatorOfOtherRanksIsRefused) {
  const LoneCommunicator comm;
  for (const char* strategy : kStrategies) {
    const GpuSetting setting{.options = {.nccl_comm = comm.get()}, .strategy = strategy};
    run_on_gpu(case_of({9, 7}), setting, [&](GpuRank& rank, const StepBytes& /*wanted*/) {
      EXPECT_THAT(message_of([&] { rank.plan(); }),
                  HasSubstr("the NCCL communicator must have the group's ranks: it has rank 0 of "
                            "1, the group rank 0 of 2"));
      rank.group.check();
    });
  }
}

#else

TEST_F(CudaNccl, IsRefusedWhereTheBuildHasNone) {
  int anything = 0;
  for (const char* strategy : kStrategies) {
    const GpuSetting setting{.options = {.nccl_comm = &anything}, .strategy = strategy};
    run_on_gpu(case_of({9, 7}), setting, [&](GpuRank& rank, const StepBytes& /*wanted*/) {
      EXPECT_THAT(message_of([&] { rank.plan(); }), HasSubstr("this build has no NCCL"));
      rank.group.check();
    });
  }
}

#endif

}  // namespace
}  // namespace crossdock
