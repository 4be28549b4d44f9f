// How the hosts, meeting after their devices were halted, find the cause. Needs no GPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "comm/cuda/peer_calls.cuh"
#include "crossdock/threads.hpp"
#include "dispatch/cuda/run_ahead.hpp"

namespace crossdock::cuda {
namespace {

using ::testing::HasSubstr;
using MakeAccount = std::function<std::optional<CallAccount>(int rank)>;

CallAccount account(const char* operation, uint64_t subject, std::string config) {
  return {.call = {operation, subject, std::move(config)}, .refusal = std::nullopt};
}

// All 4 ranks get the same error.
void expect_error(ErrorCode code, int culprit, const std::string& text, const MakeAccount& make) {
  run_ranks(4, [&](Group& group) {
    const Error error = explain_halt(group, make(group.rank()));
    EXPECT_EQ(error.code(), code);
    EXPECT_EQ(error.context().culprit, culprit);
    EXPECT_THAT(error.what(), HasSubstr(text));
    group.check();
    group.agree({.operation = "next"});
  });
}

TEST(CallAccount, NamesTheRankAtAnotherCall) {
  expect_error(ErrorCode::kMismatch, 2,
               "rank 2 is at combine of plan 7 while the others are at dispatch of plan 7",
               [](int rank) { return account(rank == 2 ? "combine" : "dispatch", 7, "a=1"); });
}

TEST(CallAccount, NamesTheSettingThatDiffers) {
  expect_error(ErrorCode::kMismatch, 3, "num_chunks=2", [](int rank) {
    return account("dispatch", 7,
                   rank == 3 ? "dtype=bf16;num_chunks=2" : "dtype=bf16;num_chunks=1");
  });
}

TEST(CallAccount, RepeatsTheRefusalOfTheLowestRank) {
  expect_error(ErrorCode::kCapacity, 1, "rank 1: no room", [](int rank) {
    CallAccount own = account("plan", 0, "");
    if (rank > 0) own.refusal = Error(ErrorCode::kCapacity, rank == 1 ? "no room" : "none either");
    return own;
  });
}

// Ranks without an account were halted because another rank stopped.
TEST(CallAccount, AsksOnlyRanksThatHaveOne) {
  expect_error(ErrorCode::kInvalidArgument, 3, "rank 3: x is wrong",
               [](int rank) -> std::optional<CallAccount> {
                 if (rank != 3) return std::nullopt;
                 CallAccount own = account("dispatch", 5, "dtype=fp32");
                 own.refusal = Error(ErrorCode::kInvalidArgument, "x is wrong");
                 return own;
               });
}

TEST(CallAccount, IsABugIfNobodyHasOne) {
  expect_error(ErrorCode::kInternal, -1, "no rank knows why", [](int) { return std::nullopt; });
}

TEST(CallLog, KeepsTheLastCalls) {
  CallLog log;
  for (uint32_t i = 1; i <= 3000; ++i) EXPECT_EQ(log.add({"plan", i, "text"}), i);
  EXPECT_EQ(log.find(0), nullptr);
  EXPECT_EQ(log.find(1900), nullptr);
  EXPECT_EQ(log.find(3001), nullptr);
  ASSERT_NE(log.find(2500), nullptr);
  EXPECT_EQ(log.find(2500)->subject, 2500);
}

TEST(CallLog, HashesDifferAndAreNoneOfTheSpecialValues) {
  const uint32_t hash = hash_of_call({"dispatch", 7, "dtype=bf16"});
  EXPECT_EQ(hash, hash_of_call({"dispatch", 7, "dtype=bf16"}));
  EXPECT_NE(hash, hash_of_call({"combine", 7, "dtype=bf16"}));
  EXPECT_NE(hash, hash_of_call({"dispatch", 8, "dtype=bf16"}));
  EXPECT_NE(hash, hash_of_call({"dispatch", 7, "dtype=fp16"}));
  for (uint64_t plan = 0; plan < 100000; ++plan) {
    const uint32_t one = hash_of_call({"dispatch", plan, ""});
    ASSERT_GE(one, QueuedCall::kFirstHash);
    ASSERT_LT(one, QueuedCall::kFailed);
  }
}

}  // namespace
}  // namespace crossdock::cuda
