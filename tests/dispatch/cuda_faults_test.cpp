// What goes wrong on the device is an error on the host, within its deadline, and the next step
// works.

#include <gtest/gtest.h>

#include <thread>

#include "dispatch/cuda_step.hpp"

namespace crossdock {
namespace {

using CudaFaults = CudaTest;

DispatchConfig config_with_room(int64_t max_rows) {
  return {.num_experts = 6, .top_k = 2, .width = 16, .max_rows = max_rows};
}

// Runs a step that the device refuses; the error comes at the next call, alike on all ranks.
void expect_refusal(const DispatchCase& bad, const DispatchCase& good, ErrorCode code,
                    const std::string& text) {
  run_on_gpu(good, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const auto r = static_cast<size_t>(rank.group.rank());
    const DeviceTensors bad_tensors(tensors_of(bad.config, bad.ranks[r], DType::kF32), rank.stream);
    const Plan plan = rank.dispatcher.plan(bad_tensors.routing());
    if (rank.group.rank() == 0) rank.stream.synchronize();  // the others may not know yet
    const std::optional<Error> error =
        error_of([&] { rank.dispatcher.dispatch(plan, {.x = bad_tensors.x.view}); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), code);
    EXPECT_NE(std::string(error->what()).find(text), std::string::npos) << error->what();
    const QueuedStep next(rank.dispatcher, rank.tensors);
    EXPECT_EQ(next.wait(rank.stream).out, wanted.out);
    rank.dispatcher.check();
  });
}

TEST_F(CudaFaults, AnIdOutOfRangeIsNamedOnAllRanks) {
  const DispatchCase good = random_case(config_with_room(100), {9, 7, 8}, 40);
  DispatchCase bad = good;
  bad.ranks[2].mask.assign(bad.ranks[2].mask.size(), 0);
  bad.ranks[2].expert_ids[7] = 6;
  expect_refusal(bad, good, ErrorCode::kInvalidArgument, "rank 2: token 3, slot 1: expert id 6");
}

TEST_F(CudaFaults, ARepeatedIdIsNamedOnAllRanks) {
  const DispatchCase good = random_case(config_with_room(100), {9, 7}, 41);
  DispatchCase bad = good;
  bad.ranks[0].mask.assign(bad.ranks[0].mask.size(), 0);
  bad.ranks[0].expert_ids[8] = 3;
  bad.ranks[0].expert_ids[9] = 3;
  expect_refusal(bad, good, ErrorCode::kInvalidArgument, "rank 0: token 4, slot 1: expert id 3");
}

// The call that finds out is one that begins beside the stream in which the plan was made.
TEST_F(CudaFaults, ABegunCallReportsABadRoutingOnce) {
  const DispatchCase good = random_case(config_with_room(100), {9, 7, 8}, 44);
  run_on_gpu(good, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    RankTensors host =
        tensors_of(good.config, good.ranks[static_cast<size_t>(rank.group.rank())], DType::kF32);
    if (rank.group.rank() == 1) host.expert_ids.view.as<int32_t>()[0] = 6;
    const DeviceTensors bad(host, rank.stream);
    const DispatchArgs args{.x = rank.tensors.x.view};
    rank.dispatcher.finish(rank.dispatcher.begin_dispatch(rank.plan(), args));  // sets up
    const Plan plan = rank.dispatcher.plan(bad.routing());
    if (rank.group.rank() == 0) rank.stream.synchronize();  // the others may not know yet
    const std::string message = message_of([&] { rank.dispatcher.begin_dispatch(plan, args); });
    EXPECT_NE(message.find("rank 1: token 0, slot 0: expert id 6"), std::string::npos) << message;
    const QueuedStep next(rank.dispatcher, rank.tensors);
    EXPECT_EQ(next.wait(rank.stream).out, wanted.out);
    rank.dispatcher.check();
  });
}

TEST_F(CudaFaults, ACapacityTooSmallSaysWhatIsNeeded) {
  DispatchCase good = random_case(config_with_room(12), {6, 6}, 42);
  for (reference::RankInput& rank : good.ranks) {
    rank.mask.assign(rank.mask.size(), 0);
    for (size_t i = 0; i < rank.expert_ids.size(); ++i) {
      rank.expert_ids[i] = i % 2 == 0 ? static_cast<int64_t>(i / 2 % 3) : 3;
    }
  }
  DispatchCase bad = good;
  for (reference::RankInput& rank : bad.ranks) {
    for (size_t i = 0; i < rank.expert_ids.size(); ++i) {
      rank.expert_ids[i] = static_cast<int64_t>(i % 2);
    }
  }
  expect_refusal(bad, good, ErrorCode::kCapacity,
                 "rank 0 would receive 24 rows, more than max_rows (12)");
}

// A rank whose stream sleeps before the dispatch or the combine of a step.
struct LateCall {
  bool is_combine = false;
  int max_sms = 0;
};

// The other rank's error names it, within the deadline.
void expect_late_rank_is_named(const LateCall& late) {
  const DispatchCase the_case = random_case(config_with_room(100), {9, 7}, 43);
  ThreadOptions options = short_deadlines();
  options.group.arrival_deadline = std::chrono::seconds(1);
  try_ranks(
      2,
      [&](Group& group) {
        GpuRank rank(group, the_case, {.options = {.max_sms = late.max_sms}});
        const Plan plan = rank.plan();
        const OwnedTensor rows = rank.dispatcher.allocate_rows(plan, DType::kF32);
        rank.stream.synchronize();
        const auto begin = std::chrono::steady_clock::now();
        if (group.rank() == 1) {
          const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::seconds(3)); };
          cuda_ok(cudaLaunchHostFunc(rank.stream.get(), sleep, nullptr));
        }
        if (late.is_combine) {
          rank.dispatcher.combine(plan, rows.view);
        } else {
          rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .with_row_weights = true});
        }
        rank.stream.synchronize();
        if (group.rank() != 0) return;
        const std::optional<Error> error = error_of([&] { rank.dispatcher.check(); });
        ASSERT_TRUE(error.has_value());
        EXPECT_EQ(error->code(), ErrorCode::kTimeout);
        EXPECT_EQ(error->context().culprit, 1);
        EXPECT_NE(std::string(error->what()).find("rank 1"), std::string::npos) << error->what();
        EXPECT_TRUE(group.is_poisoned());
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
      },
      options);
}

// New ranks work: the CUDA context is alive.
void expect_new_ranks_work() {
  const DispatchCase the_case = random_case(config_with_room(100), {9, 7}, 43);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const QueuedStep step(rank.dispatcher, rank.tensors);
    EXPECT_EQ(step.wait(rank.stream).out, wanted.out);
  });
}

TEST_F(CudaFaults, ARankWhoseGpuDoesNotComeIsNamedWithinTheDeadline) {
  for (const LateCall& late :
       {LateCall{}, LateCall{.is_combine = true}, LateCall{.is_combine = true, .max_sms = 20}}) {
    expect_late_rank_is_named(late);
    expect_new_ranks_work();
  }
}

}  // namespace
}  // namespace crossdock
