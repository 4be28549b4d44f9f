// Group::agree: what all ranks learn, and what happens if they disagree, for every communicator.
#include <gtest/gtest.h>

#include <cstring>
#include <string_view>

#include "comm/group_runner.hpp"

namespace crossdock::testing {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void expect_usable(Group& group) {
  EXPECT_FALSE(group.is_poisoned());
  const std::string own = "still here: " + std::to_string(group.rank());
  const Agreement agreement = group.agree({.operation = "recheck", .body = bytes_of(own)});
  for (int rank = 0; rank < group.size(); ++rank) {
    EXPECT_EQ(text_of(agreement.body(rank)), "still here: " + std::to_string(rank));
  }
}

/// Each rank proposes; all must end in the same error, and the group stays usable.
void expect_same_error(int size, const std::function<Proposal(int rank)>& propose,
                       const Outcome& expected) {
  const auto outcomes = run_group(
      size,
      [&](Group& group) {
        try {
          group.agree(propose(group.rank()));
        } catch (const Error&) {
          expect_usable(group);
          throw;
        }
      },
      ample_deadlines());
  for (const Outcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.threw);
    EXPECT_EQ(outcome.message, expected.message);
    EXPECT_EQ(outcome.code, expected.code);
    EXPECT_EQ(outcome.culprit, expected.culprit);
    EXPECT_EQ(outcome.sequence, 1u);
  }
}

TEST(Agree, BringsTheBodiesOfAllRanks) {
  for (const int size : group_sizes()) {
    run_healthy_group(size, [&](Group& group) {
      for (uint64_t step = 1; step <= 5; ++step) {
        const auto body_of = [&](int rank) {
          return std::string(static_cast<size_t>(rank) * 1000 * step,
                             static_cast<char>('a' + rank));
        };
        const std::string own = body_of(group.rank());
        const Agreement agreement = group.agree({.operation = "plan", .body = bytes_of(own)});
        EXPECT_EQ(agreement.sequence, step);
        for (int rank = 0; rank < size; ++rank) {
          EXPECT_EQ(text_of(agreement.body(rank)), body_of(rank));
        }
      }
    });
  }
}

TEST(Agree, WorksWithoutBodies) {
  run_healthy_group(group_sizes().back(), [](Group& group) {
    const Agreement agreement =
        group.agree({.operation = "dispatch", .subject = 3, .config = "top_k=8"});
    EXPECT_EQ(agreement.body(0).size(), 0u);
  });
}

TEST(Agree, TurnsARefusalIntoTheSameErrorOnAllRanks) {
  for (const int size : group_sizes()) {
    const int culprit = size / 2;
    const Error refusal(ErrorCode::kCapacity, "token 5, slot 1: expert id 99 must be below 8");
    const std::string body(20000, 'x');
    expect_same_error(size,
                      [&](int rank) {
                        return Proposal{.operation = "plan",
                                        .body = bytes_of(body),
                                        .refusal = rank == culprit ? &refusal : nullptr};
                      },
                      {.code = ErrorCode::kCapacity,
                       .culprit = culprit,
                       .message = "rank " + std::to_string(culprit) +
                                  ": token 5, slot 1: expert id 99 must be below 8"});
  }
}

TEST(Agree, ReportsTheLowestRankThatRefuses) {
  const int size = group_sizes().back();
  if (size < 2) GTEST_SKIP() << "needs two ranks";
  std::vector<Error> refusals;
  for (int rank = 0; rank < size; ++rank) {
    refusals.emplace_back(ErrorCode::kInvalidArgument, "reason " + std::to_string(rank));
  }
  expect_same_error(
      size,
      [&](int rank) {
        return Proposal{.operation = "plan",
                        .refusal = rank > 0 ? &refusals[static_cast<size_t>(rank)] : nullptr};
      },
      {.code = ErrorCode::kInvalidArgument, .culprit = 1, .message = "rank 1: reason 1"});
}

TEST(Agree, NamesTheSettingThatDiffers) {
  for (const int size : group_sizes()) {
    if (size < 2) continue;
    const int culprit = size - 1;
    expect_same_error(
        size,
        [&](int rank) {
          return Proposal{.operation = "plan",
                          .config = rank == culprit ? "experts=64;top_k=4;width=16"
                                                    : "experts=64;top_k=8;width=16"};
        },
        {.code = ErrorCode::kMismatch,
         .culprit = culprit,
         .message = "rank " + std::to_string(culprit) +
                    " has top_k=4 where rank 0 has top_k=8; all ranks of a group must "
                    "have the same configuration"});
  }
}

TEST(Agree, HoldsTheLargerSideForRight) {
  const int size = group_sizes().back();
  if (size < 3) GTEST_SKIP() << "needs three ranks";
  expect_same_error(
      size,
      [&](int rank) { return Proposal{.operation = "plan", .config = rank == 0 ? "k=1" : "k=2"}; },
      {.code = ErrorCode::kMismatch,
       .culprit = 0,
       .message = "rank 0 has k=1 where rank 1 has k=2; all ranks of a group must have the "
                  "same configuration"});
}

TEST(Agree, NamesTheRankAtAnotherOperation) {
  for (const int size : group_sizes()) {
    if (size < 2) continue;
    expect_same_error(
        size,
        [&](int rank) {
          return Proposal{.operation = rank == 1 ? "combine" : "dispatch", .subject = 11};
        },
        {.code = ErrorCode::kMismatch,
         .culprit = 1,
         .message = std::string("rank 1 is at combine of plan 11 while ") +
                    (size == 2 ? "rank 0 is" : "the others are") +
                    " at dispatch of plan 11 (call 1); every rank must make the same calls in "
                    "the same order"});
  }
}

TEST(Agree, NamesTheRankWithAnotherPlan) {
  const int size = group_sizes().back();
  if (size < 3) GTEST_SKIP() << "needs three ranks";
  expect_same_error(
      size,
      [&](int rank) { return Proposal{.operation = "dispatch", .subject = rank == 2 ? 12u : 11u}; },
      {.code = ErrorCode::kMismatch,
       .culprit = 2,
       .message = "rank 2 is at dispatch of plan 12 while the others are at dispatch of plan 11 "
                  "(call 1); every rank must make the same calls in the same order"});
}

TEST(Agree, IsRecordedOnce) {
  run_healthy_group(group_sizes().back(), [](Group& group) {
    const std::string body = "12345";
    group.agree({.operation = "plan", .body = bytes_of(body)});
    const auto events = group.recorder().events();
    ASSERT_EQ(events.size(), 1u);
    EXPECT_STREQ(events[0].operation, "plan");
    EXPECT_EQ(events[0].sequence, 1u);
    EXPECT_EQ(events[0].bytes, 5);
    EXPECT_GE(events[0].end_ns, events[0].begin_ns);
  });
}

}  // namespace
}  // namespace crossdock::testing
