// GPUs that cannot reach each other's memory, simulated on one GPU: rows go through host memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaStaged = CudaTest;

constexpr comm::GpuPretences kOutOfReach{.reaches_nobody = true};

const char* const kAllStrategies[] = {"direct", "hierarchical", "alltoall", "allgather"};

DispatchCase staged_case(const std::vector<int64_t>& tokens_per_rank) {
  return random_case({.num_experts = 11, .top_k = 3, .width = 40}, tokens_per_rank, 83);
}

// Exchanges of rows through the communicator so far.
int64_t num_exchanges(Group& group) {
  int64_t count = 0;
  for (const Event& event : group.recorder().events()) {
    if (std::string(event.operation) == "dispatch" && std::string(event.phase) == "exchange") {
      ++count;
    }
  }
  return count;
}

void expect_bits(GpuRank& rank, const StepBytes& wanted) {
  for (int step = 0; step < 2; ++step) {
    const QueuedStep queued(rank.dispatcher, rank.tensors);
    expect_same(queued.wait(rank.stream), wanted);
  }
  rank.dispatcher.check();
}

TEST_F(CudaStaged, GivesTheBitsOfTheCpu) {
  for (const char* strategy : kAllStrategies) {
    SCOPED_TRACE(strategy);
    run_on_gpu(staged_case({50, 0, 30, 77}),
               {.dtype = DType::kBF16, .strategy = strategy, .pretences = kOutOfReach},
               [](GpuRank& rank, const StepBytes& wanted) {
                 const int64_t before = num_exchanges(rank.group);  // of the CPU's step
                 expect_bits(rank, wanted);
                 EXPECT_GT(num_exchanges(rank.group), before);
               });
  }
}

TEST_F(CudaStaged, IsNotUsedByGpusThatReachEachOther) {
  run_on_gpu(staged_case({50, 30}), {}, [](GpuRank& rank, const StepBytes& wanted) {
    const int64_t before = num_exchanges(rank.group);
    expect_bits(rank, wanted);
    EXPECT_EQ(num_exchanges(rank.group), before);
  });
}

// Staging memory for one row of each pair of ranks, or for a few.
TEST_F(CudaStaged, GivesTheBitsOfTheCpuInRounds) {
  const DispatchCase the_case = staged_case({50, 0, 30});
  for (const int64_t staging_bytes : {int64_t{1}, int64_t{7 * 3 * 40 * 4}}) {
    ThreadOptions options = short_deadlines();
    options.group.staging_bytes = staging_bytes;
    run_ranks(
        3,
        [&](Group& group) {
          comm::gpu_pretences_of(group) = kOutOfReach;
          const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
          GpuRank rank(group, the_case, {});
          expect_bits(rank, wanted);
        },
        options);
  }
}

TEST_F(CudaStaged, CallsMayBeginBesideTheStream) {
  run_on_gpu(staged_case({50, 30}), {.pretences = kOutOfReach},
             [](GpuRank& rank, const StepBytes& wanted) {
               const Plan plan = rank.plan();
               Pending<DispatchResult> pending =
                   rank.dispatcher.begin_dispatch(plan, {.x = rank.tensors.x.view});
               const DispatchResult moved = rank.dispatcher.finish(std::move(pending));
               Pending<OwnedTensor> summed = rank.dispatcher.begin_combine(plan, moved.rows.view);
               const OwnedTensor out = rank.dispatcher.finish(std::move(summed));
               EXPECT_EQ(to_host(moved.rows.view, rank.stream), wanted.rows);
               EXPECT_EQ(to_host(out.view, rank.stream), wanted.out);
             });
}

// Rank 1 captures; both ranks get its error and continue.
TEST_F(CudaStaged, ACapturedCallIsRefusedOnAllRanks) {
  run_on_gpu(
      staged_case({50, 30}), {.pretences = kOutOfReach},
      [](GpuRank& rank, const StepBytes& wanted) {
        const Plan plan = rank.plan();
        rank.stream.synchronize();
        const bool captures = rank.group.rank() == 1;
        if (captures) {
          cuda_ok(cudaStreamBeginCapture(rank.stream.get(), cudaStreamCaptureModeThreadLocal));
        }
        EXPECT_THAT(message_of([&] { rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view}); }),
                    HasSubstr("rank 1: GPUs that cannot reach each other's memory"));
        if (captures) {
          cudaGraph_t graph = nullptr;
          cuda_ok(cudaStreamEndCapture(rank.stream.get(), &graph));
          cuda_ok(cudaGraphDestroy(graph));
        }
        expect_bits(rank, wanted);
      });
}

// Rank 1's stream is blocked, so its host cannot send its rows.
TEST_F(CudaStaged, ALateRankIsNamed) {
  const DispatchCase the_case = staged_case({50, 30});
  ThreadOptions options = short_deadlines();
  options.group.arrival_deadline = options.group.progress_deadline = std::chrono::seconds(2);
  Gate late;
  run_ranks(
      2,
      [&](Group& group) {
        comm::gpu_pretences_of(group) = kOutOfReach;
        GpuRank rank(group, the_case, {});
        { const QueuedStep warm(rank.dispatcher, rank.tensors); }
        const Plan plan = rank.plan();
        if (group.rank() == 1) late.hold(rank.stream.get());
        const std::optional<Error> error =
            error_of([&] { rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view}); });
        ASSERT_TRUE(error.has_value());
        EXPECT_TRUE(group.is_poisoned());
        if (group.rank() == 0) {
          EXPECT_EQ(error->code(), ErrorCode::kTimeout) << error->what();
          EXPECT_EQ(error->context().culprit, 1) << error->what();
        } else {
          EXPECT_TRUE(late.is_closed());
          late.open();
        }
      },
      options);
}

}  // namespace
}  // namespace crossdock
