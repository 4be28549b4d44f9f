// Processes on one GPU run ahead of each other. Compiled for each communicator of processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "dispatch/cuda/sharing.hpp"
#include "support/process_communicator.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaProcessesRunAhead = CudaSharing;

DispatchCase case_of(const Group& group, const DispatchConfig& config, unsigned seed) {
  return random_case(config, std::vector<int64_t>(static_cast<size_t>(group.size()), 40), seed);
}

DispatchConfig small_config() {
  return {.num_experts = 9, .top_k = 2, .width = 72, .max_rows = 400};
}

// The hosts of the other ranks wait until rank 0 has queued all its steps. If its host had to meet
// theirs, they would be at a different call.
void expect_steps_queued_while_others_wait(const DispatchConfig& config, int num_steps) {
  Group group(testing::make_process_communicator(), deadlines());
  const DispatchCase the_case = case_of(group, config, 31);
  const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
  GpuRank rank(group, the_case, {});
  { const QueuedStep connects(rank.dispatcher, rank.tensors); }
  rank.stream.synchronize();
  if (group.rank() > 0) group.agree({.operation = "queued"});
  std::vector<std::unique_ptr<QueuedStep>> steps;
  for (int step = 0; step < num_steps; ++step) {
    steps.push_back(std::make_unique<QueuedStep>(rank.dispatcher, rank.tensors));
  }
  if (group.rank() == 0) group.agree({.operation = "queued"});
  for (const auto& step : steps) expect_same(step->wait(rank.stream), wanted);
  rank.dispatcher.check();
  group.agree({.operation = "done"});
}

TEST_F(CudaProcessesRunAhead, QueueTenStepsWhileThePeersHostsWait) {
  share_by("fd");
  expect_steps_queued_while_others_wait(small_config(), 10);
}

// All results are kept: the memory of every rank grows by more than 500 MB meanwhile.
TEST_F(CudaProcessesRunAhead, GrowMemoryWhileThePeersHostsWait) {
  share_by("fd");
  DispatchConfig config = small_config();
  config.width = 512;
  config.max_rows = 20000;
  expect_steps_queued_while_others_wait(config, 6);
}

TEST_F(CudaProcessesRunAhead, SendOneCopyPerRankAndPartialSums) {
  share_by("fd");
  DispatchConfig config = small_config();
  config.copies = Copies::kPerRank;
  config.partial_sums = PartialSums::kF32;
  expect_steps_queued_while_others_wait(config, 3);
}

TEST_F(CudaProcessesRunAhead, GetTheSameErrorLater) {
  share_by("fd");
  Group group(testing::make_process_communicator(), deadlines());
  const DispatchCase the_case = case_of(group, small_config(), 32);
  const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
  GpuRank rank(group, the_case, {});
  for (int round = 0; round < 3; ++round) {
    const QueuedStep step(rank.dispatcher, rank.tensors);
    expect_same(step.wait(rank.stream), wanted);
    const std::string message = message_of([&] {
      const Plan plan = rank.plan();
      TensorView x = rank.tensors.x.view;
      if (group.rank() == 1) x.shape = {1, 72};
      rank.dispatcher.dispatch(plan, {.x = x});
      const QueuedStep behind(rank.dispatcher, rank.tensors);
      rank.stream.synchronize();
      rank.dispatcher.check();
    });
    EXPECT_THAT(message, HasSubstr("rank 1: x must be [40, 72], got [1, 72]"));
  }
  const QueuedStep step(rank.dispatcher, rank.tensors);
  expect_same(step.wait(rank.stream), wanted);
  rank.dispatcher.check();
  group.agree({.operation = "done"});
}

// Two dispatchers in one stream: one rank stops at a call of the first while the others are already
// waiting in a call of the second.
TEST_F(CudaProcessesRunAhead, AreNotHeldUpByAnotherDispatcher) {
  share_by("fd");
  Group group(testing::make_process_communicator(), deadlines());
  const DispatchCase the_case = case_of(group, small_config(), 33);
  const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
  GpuRank rank(group, the_case, {});
  Dispatcher second(group, the_case.config, "direct");
  second.set_device_options({.stream = rank.stream.view()});
  const auto expect_both_work = [&] {
    const QueuedStep step(rank.dispatcher, rank.tensors);
    const QueuedStep of_second(second, rank.tensors);
    expect_same(step.wait(rank.stream), wanted);
    expect_same(of_second.wait(rank.stream), wanted);
  };
  expect_both_work();
  const std::string message = message_of([&] {
    const Plan plan = rank.plan();
    TensorView x = rank.tensors.x.view;
    if (group.rank() == 1) x.shape = {1, 72};
    rank.dispatcher.dispatch(plan, {.x = x});
    const QueuedStep of_second(second, rank.tensors);
    rank.stream.synchronize();
    second.check();
    rank.dispatcher.check();
  });
  EXPECT_THAT(message, HasSubstr("rank 1: x must be [40, 72], got [1, 72]"));
  expect_both_work();
  group.agree({.operation = "done"});
}

}  // namespace
}  // namespace crossdock
