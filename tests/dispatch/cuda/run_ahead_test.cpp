// Calls whose hosts do not meet: the kernels check whether the ranks make the same calls. Ranks are
// threads here, which run ahead only in tests; run_ahead_processes_test.cpp tests processes, which
// always do.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/run_ahead_case.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

TEST_F(CudaRunAhead, HasTheBitsOfTheCpu) {
  for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{40, 31},
                                             {0, 90, 17, 3},
                                             {9, 8, 7, 0, 5, 4, 3},
                                             {12, 0, 12, 40, 12, 1, 12, 12}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(std::to_string(tokens.size()) + " ranks");
      run_ahead_on_gpu(case_of(tokens, 3), {.dtype = dtype}, expect_steps_work);
    }
  }
}

TEST_F(CudaRunAhead, HasThemWithManyTokens) {
  const DispatchConfig config{.num_experts = 16, .top_k = 4, .width = 72, .max_rows = 20000};
  const DispatchCase the_case = random_case(config, {3000, 1, 1777}, 4);
  run_ahead_on_gpu(the_case, {.dtype = DType::kBF16}, expect_steps_work);
}

TEST_F(CudaRunAhead, HasThemWithOneCopyPerRankAndPartialSums) {
  for (const PartialSums sums : {PartialSums::kNone, PartialSums::kF32, PartialSums::kRowType}) {
    DispatchCase the_case = case_of({30, 0, 26, 11}, 5);
    the_case.config.copies = Copies::kPerRank;
    the_case.config.partial_sums = sums;
    run_ahead_on_gpu(the_case, {.dtype = DType::kBF16}, expect_steps_work);
  }
}

TEST_F(CudaRunAhead, HasThemInBegunCallsAndTheirChunks) {
  run_ahead_on_gpu(case_of({40, 25, 0}, 6), {}, [](GpuRank& rank, const StepBytes& wanted) {
    for (const int64_t num_chunks : {1, 3}) {
      const Plan plan = rank.plan();
      DispatchResult moved = rank.dispatcher.finish(rank.dispatcher.begin_dispatch(
          plan, {.x = rank.tensors.x.view, .num_chunks = num_chunks}));
      const OwnedTensor out =
          rank.dispatcher.finish(rank.dispatcher.begin_combine(plan, moved.rows.view, {}));
      EXPECT_EQ(to_host(moved.rows.view, plan.num_rows(), rank.stream), wanted.rows);
      EXPECT_EQ(to_host(out.view, rank.stream), wanted.out);
    }
    rank.dispatcher.check();
  });
}

// Rows of the caller at an odd address are copied.
TEST_F(CudaRunAhead, TakesRowsOfTheCaller) {
  run_ahead_on_gpu(case_of({40, 25, 0}, 7), {}, [](GpuRank& rank, const StepBytes& wanted) {
    for (const int64_t offset : {0, 1}) {
      const Plan plan = rank.plan();
      const Shape shape{plan.capacity_rows(), kWidth};
      const OwnedTensor memory =
          device_tensor(DType::kF32, {shape.num_elements() + 1}, rank.stream);
      TensorView rows = memory.view;
      rows.shape = shape;
      rows.data = static_cast<float*>(rows.data) + offset;
      rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .rows = rows});
      const OwnedTensor out = rank.dispatcher.combine(plan, rows);
      EXPECT_EQ(to_host(rows, plan.num_rows(), rank.stream), wanted.rows);
      EXPECT_EQ(to_host(out.view, rank.stream), wanted.out);
    }
    rank.dispatcher.check();
  });
}

// Rank 0 has queued all its steps before rank 1 makes its next call.
TEST_F(CudaRunAhead, QueuesTenStepsWhileAPeersHostDoesSomethingElse) {
  Gate queued;
  run_ahead_on_gpu(case_of({40, 25}, 8), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    { const QueuedStep connects(rank.dispatcher, rank.tensors); }
    if (rank.group.rank() == 1) {
      EXPECT_TRUE(queued.wait());
    }
    std::vector<std::unique_ptr<QueuedStep>> steps;
    for (int step = 0; step < 10; ++step) {
      steps.push_back(std::make_unique<QueuedStep>(rank.dispatcher, rank.tensors));
    }
    if (rank.group.rank() == 0) queued.open();
    for (const auto& step : steps) expect_same(step->wait(rank.stream), wanted);
    rank.dispatcher.check();
  });
}

// A part of memory that the library allocated, at an odd address.
TEST_F(CudaRunAhead, TakesAnyPartOfItsOwnMemory) {
  DispatchCase the_case = case_of({40, 25, 9}, 20);
  run_ahead_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    expect_steps_work(rank, wanted);
    const Plan plan = rank.plan();
    const DispatchResult moved = rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view});
    const OwnedTensor wide = rank.dispatcher.allocate_rows(plan, DType::kF32);
    TensorView y = wide.view;
    const int64_t used = plan.num_rows() * kWidth;
    ASSERT_LT(used, plan.capacity_rows() * kWidth);  // there is room for one more value
    y.data = static_cast<float*>(y.data) + 1;
    cuda_ok(cudaMemcpyAsync(y.data, moved.rows.view.data, static_cast<size_t>(used) * sizeof(float),
                            cudaMemcpyDeviceToDevice, rank.stream.get()));
    const OwnedTensor out = rank.dispatcher.combine(plan, y);
    EXPECT_EQ(to_host(out.view, rank.stream), wanted.out);
    rank.dispatcher.check();
  });
}

TEST_F(CudaRunAhead, AlternatesWithGraphs) {
  run_ahead_on_gpu(case_of({40, 25, 9}, 15), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    expect_steps_work(rank, wanted);
    std::optional<QueuedStep> captured;
    const CapturedGraph graph(rank, [&] { captured.emplace(rank.dispatcher, rank.tensors); });
    for (int round = 0; round < 3; ++round) {
      graph.launch();
      expect_same(captured->wait(rank.stream), wanted);
      expect_steps_work(rank, wanted);
    }
  });
}

// Rank 1 makes no call at all: the wait on the device ends.
TEST_F(CudaRunAhead, ARankThatMakesNoCallIsNamedAfterTheDeadline) {
  Gate done;
  ThreadOptions options = short_deadlines();
  options.group.arrival_deadline = std::chrono::seconds(2);
  const DispatchCase the_case = case_of({40, 25}, 16);
  run_ranks(
      2,
      [&](Group& group) {
        comm::gpu_pretences_of(group) = kThreadsRunAhead;
        GpuRank rank(group, the_case, {});
        { const QueuedStep connects(rank.dispatcher, rank.tensors); }
        rank.stream.synchronize();
        if (group.rank() == 1) {
          EXPECT_TRUE(done.wait());
          return;
        }
        const GateOpener opener(done);
        static_cast<void>(rank.plan());
        rank.stream.synchronize();
        const std::optional<Error> error = error_of([&] { rank.dispatcher.check(); });
        ASSERT_TRUE(error.has_value());
        EXPECT_EQ(error->code(), ErrorCode::kTimeout) << error->what();
        EXPECT_EQ(error->context().culprit, 1) << error->what();
        EXPECT_TRUE(group.is_poisoned());
      },
      options);
}

// Rank 1 destroys its dispatcher and leaves; the other rank's device detects it.
TEST_F(CudaRunAhead, ARankThatHasLeftIsNoticedAtOnce) {
  const DispatchCase the_case = case_of({40, 25}, 17);
  run_ranks(
      2,
      [&](Group& group) {
        comm::gpu_pretences_of(group) = kThreadsRunAhead;
        GpuRank rank(group, the_case, {});
        { const QueuedStep connects(rank.dispatcher, rank.tensors); }
        rank.stream.synchronize();
        if (group.rank() == 1) {
          group.leave("it has had enough");
          return;
        }
        EXPECT_THAT(late_message(rank, [&] { static_cast<void>(rank.plan()); }),
                    HasSubstr("it has had enough"));
      },
      short_deadlines());
}

}  // namespace
}  // namespace crossdock
