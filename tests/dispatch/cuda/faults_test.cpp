// A fault on the device becomes an error on the host, within its deadline, and the next step works.

#include <gtest/gtest.h>

#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using CudaFaults = CudaTest;

DispatchConfig config_with_room(int64_t max_rows) {
  return {.num_experts = 6, .top_k = 2, .width = 16, .max_rows = max_rows};
}

// Runs a step that the device refuses; the error comes at the next call, the same on all ranks.
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

// Warps read 32 routes at a time, so the slots of token 6 are read in two steps. One block counts
// 160 tokens, several count 600.
TEST_F(CudaFaults, ARepeatedIdIsFoundWhereverItsSlotsAreRead) {
  constexpr int64_t kToken = 6;
  constexpr int64_t kSlots = 5;
  for (const int64_t tokens : {160, 600}) {
    const DispatchConfig config{
        .num_experts = 12, .top_k = kSlots, .width = 16, .max_rows = kSlots * (tokens + 3)};
    const DispatchCase good = random_case(config, {tokens, 3}, 43);
    for (const int64_t earlier : {0, 1, 2, 3}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, slot " + std::to_string(earlier));
      DispatchCase bad = good;
      bad.ranks[0].mask.assign(bad.ranks[0].mask.size(), 0);
      int64_t* ids = &bad.ranks[0].expert_ids[kToken * kSlots];
      for (int64_t slot = 0; slot < kSlots; ++slot) ids[slot] = slot == 4 ? earlier : slot;
      expect_refusal(bad, good, ErrorCode::kInvalidArgument,
                     "rank 0: token 6, slot 4: expert id " + std::to_string(earlier));
    }
  }
}

// The fault is found by a begun call, which does not run in the stream of the plan.
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
    const std::string message =
        message_of([&] { static_cast<void>(rank.dispatcher.begin_dispatch(plan, args)); });
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

}  // namespace
}  // namespace crossdock
