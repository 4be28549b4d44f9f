// A rank that throws, returns, stalls or gives up: every other rank ends in an error that names it
// and the call, and the survivors can continue. For every communicator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "comm/group_runner.hpp"

namespace crossdock::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

GroupOptions short_deadlines() {
  return {.arrival_deadline = kShort, .progress_deadline = kShort, .recorded_events = 64};
}

/// One exchange of blocks of the same size between all ranks, after a rendezvous.
void step(
    Group& group, const char* operation, int64_t block_bytes = 100,
    const std::function<void()>& before_data = [] {}) {
  const Agreement agreement = group.agree({.operation = operation});
  before_data();
  std::vector<int64_t> offsets;
  for (int rank = 0; rank <= group.size(); ++rank) offsets.push_back(rank * block_bytes);
  const Buffer send(offsets.back());
  const Buffer recv(offsets.back());
  for (int rank = 0; rank < group.size(); ++rank) {
    std::fill_n(send.data() + offsets[static_cast<size_t>(rank)], block_bytes,
                static_cast<std::byte>(group.rank() * 16 + rank));
  }
  group.all_to_all_v({send.data(), send.num_bytes(), send.owner()}, offsets,
                     {recv.data(), recv.num_bytes(), recv.owner()}, offsets,
                     group.wait_context(operation, agreement.sequence));
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::byte* block = recv.data() + offsets[static_cast<size_t>(rank)];
    const auto expected = static_cast<std::byte>(rank * 16 + group.rank());
    EXPECT_EQ(std::count(block, block + block_bytes, expected), block_bytes);
  }
}

struct Expected {
  int culprit = 0;
  ErrorCode code = ErrorCode::kPeerFailed;
  uint64_t sequence = 0;
  std::string operation = "";
  std::string text = "";  // somewhere in the message
};

/// Expects this end on every rank but the culprit.
void expect_all_blame(const std::vector<Outcome>& outcomes, const Expected& expected) {
  for (int rank = 0; rank < static_cast<int>(outcomes.size()); ++rank) {
    if (rank == expected.culprit) continue;
    const Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    EXPECT_TRUE(outcome.threw);
    EXPECT_EQ(outcome.culprit, expected.culprit) << outcome.message;
    EXPECT_EQ(outcome.code, expected.code) << outcome.message;
    EXPECT_EQ(outcome.sequence, expected.sequence) << outcome.message;
    EXPECT_EQ(outcome.operation, expected.operation);
    EXPECT_THAT(outcome.message, AllOf(StartsWith("rank " + std::to_string(rank) + " of "),
                                       HasSubstr(expected.text)));
  }
}

/// Runs the test once per group size, with the culprit in the middle.
void for_each_size(const std::function<void(int size, int culprit)>& test) {
  for (const int size : group_sizes()) {
    if (size >= 2) test(size, size / 2);
  }
}

/// The same for tests that wait for a deadline, with fewer sizes.
void for_some_sizes(const std::function<void(int size, int culprit)>& test) {
  for_each_size([&](int size, int culprit) {
    if (group_sizes().size() == 1 || size == 2 || size == 7) test(size, culprit);
  });
}

TEST(Faults, ARankThatThrowsIsNamedWithItsReason) {
  for_each_size([](int size, int culprit) {
    const auto outcomes = run_group(
        size,
        [&](Group& group) {
          step(group, "plan");
          step(group, "dispatch");
          if (group.rank() == culprit) throw std::runtime_error("boom");
          step(group, "combine");
        },
        ample_deadlines());
    EXPECT_EQ(outcomes[static_cast<size_t>(culprit)].message, "boom");
    expect_all_blame(outcomes,
                     {.culprit = culprit,
                      .code = ErrorCode::kPeerFailed,
                      .sequence = 3,
                      .operation = "combine",
                      .text = "rank " + std::to_string(culprit) +
                              " left the group (it threw: boom) before combine (call 3)"});
  });
}

TEST(Faults, ARankThatThrowsAfterTheRendezvousIsNamed) {
  for_each_size([](int size, int culprit) {
    const auto outcomes = run_group(
        size,
        [&](Group& group) {
          step(group, "plan");
          step(group, "dispatch", 100, [&] {
            if (group.rank() == culprit) throw std::runtime_error("out of memory");
          });
        },
        ample_deadlines());
    expect_all_blame(outcomes, {.culprit = culprit,
                                .code = ErrorCode::kPeerFailed,
                                .sequence = 2,
                                .operation = "dispatch",
                                .text = "out of memory"});
  });
}

TEST(Faults, ARankThatReturnsEarlyIsNamed) {
  for_each_size([](int size, int culprit) {
    const auto outcomes = run_group(
        size,
        [&](Group& group) {
          step(group, "plan");
          if (group.rank() == culprit) return;
          step(group, "dispatch");
        },
        ample_deadlines());
    EXPECT_FALSE(outcomes[static_cast<size_t>(culprit)].threw);
    expect_all_blame(outcomes, {.culprit = culprit,
                                .code = ErrorCode::kPeerFailed,
                                .sequence = 2,
                                .operation = "dispatch",
                                .text = "left the group (it returned) before dispatch (call 2)"});
  });
}

TEST(Faults, ARankThatStallsIsNamedAndLearnsIt) {
  for_some_sizes([](int size, int culprit) {
    const auto outcomes = run_group(
        size,
        [&](Group& group) {
          step(group, "plan");
          if (group.rank() == culprit) stall();
          step(group, "dispatch");
        },
        short_deadlines());
    expect_all_blame(outcomes, {.culprit = culprit,
                                .code = ErrorCode::kTimeout,
                                .sequence = 2,
                                .operation = "dispatch",
                                .text = "waited 1 s for rank " + std::to_string(culprit) +
                                        " to arrive at dispatch (call 2); is it making the same "
                                        "calls?"});
    const Outcome& late = outcomes[static_cast<size_t>(culprit)];
    EXPECT_TRUE(late.threw);
    EXPECT_EQ(late.culprit, culprit);
    EXPECT_EQ(late.code, ErrorCode::kTimeout);
  });
}

TEST(Faults, ARankThatStallsAfterTheRendezvousIsNamed) {
  for_some_sizes([](int size, int culprit) {
    // Large blocks, abandoned in mid-exchange: their memory is freed while the culprit still
    // sleeps.
    const auto outcomes =
        run_group(size,
                  [&](Group& group) {
                    step(group, "dispatch", 300000, [&] {
                      if (group.rank() == culprit) stall();
                    });
                  },
                  {.arrival_deadline = kAmple, .progress_deadline = kShort, .recorded_events = 0});
    expect_all_blame(outcomes, {.culprit = culprit,
                                .code = ErrorCode::kTimeout,
                                .sequence = 1,
                                .operation = "dispatch",
                                .text = "waited 1 s for rank " + std::to_string(culprit)});
  });
}

TEST(Faults, ARankThatStallsBeforeARendezvousInsideACallIsNamedSoon) {
  const int size = group_sizes().size() == 1 ? group_sizes().front() : 2;
  const auto outcomes =
      run_group(size,
                [&](Group& group) {
                  group.agree({.operation = "dispatch"});
                  if (group.rank() == size / 2) stall();
                  group.agree({.operation = "dispatch", .under_way = true});
                },
                {.arrival_deadline = kAmple, .progress_deadline = kShort, .recorded_events = 0});
  expect_all_blame(outcomes, {.culprit = size / 2,
                              .code = ErrorCode::kTimeout,
                              .sequence = 2,
                              .operation = "dispatch",
                              .text = "waited 1 s for rank " + std::to_string(size / 2)});
}

TEST(Faults, ARankMayComeToACallLaterThanTheProgressDeadline) {
  const int size = group_sizes().size() == 1 ? group_sizes().front() : 2;
  const auto outcomes =
      run_group(size,
                [&](Group& group) {
                  if (group.rank() == size / 2) std::this_thread::sleep_for(2 * kShort);
                  group.agree({.operation = "dispatch"});
                },
                {.arrival_deadline = kAmple, .progress_deadline = kShort, .recorded_events = 0});
  for (const Outcome& outcome : outcomes) EXPECT_FALSE(outcome.threw) << outcome.message;
}

TEST(Faults, TheRankThatAllWaitForInTheEndIsNamed) {
  for_some_sizes([](int size, int culprit) {
    // Only rank 0 needs the culprit's data; the others wait for rank 0 at the next step.
    const auto outcomes = run_group(
        size,
        [&](Group& group) {
          const Agreement agreement = group.agree({.operation = "dispatch"});
          if (group.rank() == culprit) stall();
          std::vector<int64_t> send_offsets(static_cast<size_t>(size) + 1, 0);
          std::vector<int64_t> recv_offsets(static_cast<size_t>(size) + 1, 0);
          if (group.rank() == culprit) std::fill(send_offsets.begin() + 1, send_offsets.end(), 10);
          if (group.rank() == 0)
            std::fill(recv_offsets.begin() + culprit + 1, recv_offsets.end(), 10);
          const Buffer memory(10);
          const SharedBytes bytes{memory.data(), 10, memory.owner()};
          group.all_to_all_v(bytes, send_offsets, bytes, recv_offsets,
                             group.wait_context("dispatch", agreement.sequence));
          step(group, "combine");
        },
        short_deadlines());
    expect_all_blame(outcomes, {.culprit = culprit,
                                .code = ErrorCode::kTimeout,
                                .sequence = 1,
                                .operation = "dispatch",
                                .text = "rank " + std::to_string(culprit)});
  });
}

TEST(Faults, ARankThatGivesUpTellsThePeersItsReason) {
  for_each_size([](int size, int culprit) {
    const auto outcomes = run_group(
        size,
        [&](Group& group) {
          step(group, "dispatch", 100, [&] {
            if (group.rank() != culprit) return;
            group.fail(Error(ErrorCode::kCuda, "the device is gone", {-1, 1, "dispatch"}));
            group.check();
          });
        },
        ample_deadlines());
    EXPECT_EQ(outcomes[static_cast<size_t>(culprit)].message, "the device is gone");
    expect_all_blame(outcomes,
                     {.culprit = culprit,
                      .code = ErrorCode::kPeerFailed,
                      .sequence = 1,
                      .operation = "dispatch",
                      .text = "rank " + std::to_string(culprit) + " gave up: the device is gone"});
  });
}

TEST(Faults, APoisonedGroupThrowsTheSameErrorEverAfter) {
  for_each_size([](int size, int culprit) {
    run_group(
        size,
        [&](Group& group) {
          if (group.rank() == culprit) return;
          const std::string first = outcome_of([&] { step(group, "plan"); }).message;
          EXPECT_THAT(first, HasSubstr("rank " + std::to_string(culprit)));
          EXPECT_TRUE(group.is_poisoned());
          EXPECT_EQ(outcome_of([&] { step(group, "plan"); }).message, first);
          EXPECT_EQ(outcome_of([&] { group.check(); }).message, first);
          const std::vector<int64_t> nothing(static_cast<size_t>(size) + 1, 0);
          const WaitContext wait = group.wait_context("plan", 1);
          const auto exchange = [&] { group.all_to_all_v({}, nothing, {}, nothing, wait); };
          EXPECT_EQ(outcome_of(exchange).message, first);
          EXPECT_EQ(outcome_of([&] { group.all_gather_v({}, {}, nothing, wait); }).message, first);
          group.fail(Error(ErrorCode::kInternal, "another cause"));
          EXPECT_EQ(outcome_of([&] { group.check(); }).message, first);
        },
        ample_deadlines());
  });
}

TEST(Faults, TheSurvivorsGoOnWhileTheCulpritStalls) {
  for_some_sizes([](int size, int culprit) {
    std::vector<int> survivors;
    for (int rank = 0; rank < size; ++rank) {
      if (rank != culprit) survivors.push_back(rank);
    }
    const auto outcomes = run_group(
        size,
        [&](Group& group) {
          step(group, "plan");
          if (group.rank() == culprit) stall();
          const Outcome broken = outcome_of([&] { step(group, "dispatch", 50000); });
          EXPECT_EQ(broken.culprit, culprit) << broken.message;
          if (group.rank() == culprit) return;
          const auto rebuilt = group.subgroup(survivors);
          for (int round = 0; round < 3; ++round) step(*rebuilt, "dispatch", 50000);
        },
        short_deadlines());
    for (const Outcome& outcome : outcomes) EXPECT_FALSE(outcome.threw) << outcome.message;
  });
}

TEST(Faults, OneBrokenGroupDoesNotTouchAnother) {
  for_each_size([](int size, int culprit) {
    std::vector<int> everybody;
    for (int rank = 0; rank < size; ++rank) everybody.push_back(rank);
    run_healthy_group(size, [&](Group& group) {
      {
        const auto broken = group.subgroup(everybody);
        if (group.rank() != culprit) {
          EXPECT_EQ(outcome_of([&] { step(*broken, "plan"); }).culprit, culprit);
        }
      }
      step(group, "plan");
    });
  });
}

}  // namespace
}  // namespace crossdock::testing
