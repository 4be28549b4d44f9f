// What goes wrong on the device is an error on the host, within its deadline, and the next step
// works.

#include <gtest/gtest.h>

#include <thread>

#include "crossdock/cuda.hpp"
#include "dispatch/cuda_step.hpp"

namespace crossdock {
namespace {

class CudaFaults : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  }
};

DispatchConfig config_with_room(int64_t max_rows) {
  return {.num_experts = 6, .top_k = 2, .width = 16, .max_rows = max_rows};
}

// The error that a call throws, if it throws one.
template <typename Body>
std::optional<Error> error_of(const Body& body) {
  try {
    body();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

// Runs a step that the device refuses; the error comes at the next call, alike on all ranks.
void expect_refusal(const DispatchCase& bad, const DispatchCase& good, ErrorCode code,
                    const std::string& text) {
  run_ranks(
      static_cast<int>(bad.ranks.size()),
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, good, DType::kF32);
        const RankStream stream;
        const DeviceTensors bad_tensors(tensors_of(bad.config, bad.ranks[r], DType::kF32), stream);
        const DeviceTensors tensors(tensors_of(good.config, good.ranks[r], DType::kF32), stream);
        Dispatcher dispatcher(group, bad.config, "direct");
        dispatcher.set_device_options({.stream = stream.view()});
        const Plan plan = dispatcher.plan(bad_tensors.routing());
        if (group.rank() == 0) stream.synchronize();  // the others may not know yet
        const std::optional<Error> error =
            error_of([&] { dispatcher.dispatch(plan, {.x = bad_tensors.x.view}); });
        ASSERT_TRUE(error.has_value());
        EXPECT_EQ(error->code(), code);
        EXPECT_NE(std::string(error->what()).find(text), std::string::npos) << error->what();
        const QueuedStep next(dispatcher, tensors);
        EXPECT_EQ(next.wait(stream).out, wanted.out);
        dispatcher.check();
      },
      short_deadlines());
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
        const auto r = static_cast<size_t>(group.rank());
        const RankStream stream;
        const DeviceTensors tensors(tensors_of(the_case.config, the_case.ranks[r], DType::kF32),
                                    stream);
        Dispatcher dispatcher(group, the_case.config, "direct");
        dispatcher.set_device_options({.stream = stream.view(), .max_sms = late.max_sms});
        const Plan plan = dispatcher.plan(tensors.routing());
        const OwnedTensor rows = dispatcher.allocate_rows(plan, DType::kF32);
        stream.synchronize();
        const auto begin = std::chrono::steady_clock::now();
        if (group.rank() == 1) {
          const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::seconds(3)); };
          cuda_ok(cudaLaunchHostFunc(stream.get(), sleep, nullptr));
        }
        if (late.is_combine) {
          dispatcher.combine(plan, rows.view);
        } else {
          dispatcher.dispatch(plan, {.x = tensors.x.view, .with_row_weights = true});
        }
        stream.synchronize();
        if (group.rank() != 0) return;
        const std::optional<Error> error = error_of([&] { dispatcher.check(); });
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
  run_ranks(
      2,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        const RankStream stream;
        const DeviceTensors tensors(tensors_of(the_case.config, the_case.ranks[r], DType::kF32),
                                    stream);
        Dispatcher dispatcher(group, the_case.config, "direct");
        dispatcher.set_device_options({.stream = stream.view()});
        const QueuedStep step(dispatcher, tensors);
        EXPECT_EQ(step.wait(stream).out, wanted.out);
      },
      short_deadlines());
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
