// The library's own NCCL communicators: how ranks make one together. NCCL is a stand-in, so no GPU
// is needed and every rank can be made to fail.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "comm/nccl/communicator.hpp"
#include "crossdock/threads.hpp"
#include "support/fake_nccl.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using cuda::NcclCommunicator;
using test::FakeNccl;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kRanks = 4;
const std::string kConfig = "top_k=2";

ThreadOptions deadlines(std::chrono::nanoseconds arrival = std::chrono::seconds(60)) {
  ThreadOptions options;
  options.group.arrival_deadline = arrival;
  options.group.progress_deadline = std::chrono::seconds(60);
  return options;
}

std::shared_ptr<NcclCommunicator> share(Group& group, const FakeNccl& nccl, int device = 0) {
  return cuda::share_nccl_communicator(
      group, {.library = nccl.library(), .device = device, .config = kConfig, .refusal = nullptr});
}

/// Every rank connects and fails; returns the message, which must be identical on every rank. The
/// group must stay usable.
std::string shared_refusal(const FakeNccl& nccl, const ThreadOptions& options = deadlines()) {
  std::mutex mutex;
  std::set<std::string> messages;
  run_ranks(
      kRanks,
      [&](Group& group) {
        const std::string message =
            message_of([&] { share(group, nccl); }, ErrorCode::kUnsupported);
        group.agree({.operation = "meet"});
        const std::lock_guard lock(mutex);
        messages.insert(message);
      },
      options);
  EXPECT_EQ(messages.size(), 1U);
  return *messages.begin();
}

TEST(NcclConnect, DispatchersOfAGroupShareOneCommunicator) {
  const FakeNccl nccl;
  run_ranks(
      kRanks,
      [&](Group& group) {
        const auto first = share(group, nccl);
        EXPECT_TRUE(first->is_own());
        EXPECT_TRUE(first->is_connected());
        EXPECT_EQ(first->async_error(), "");
        EXPECT_EQ(share(group, nccl), first);
      },
      deadlines());
  EXPECT_EQ(nccl.await_ends(), (FakeNccl::Counts{.made = kRanks, .destroyed = kRanks}));
}

TEST(NcclConnect, ANewOneIsMadeIfARankHasGivenItsOwnUp) {
  const FakeNccl nccl;
  run_ranks(
      kRanks,
      [&](Group& group) {
        auto first = share(group, nccl);
        const NcclCommunicator* const address = first.get();
        if (group.rank() == 2) first.reset();
        const auto second = share(group, nccl);
        if (group.rank() != 2) {
          EXPECT_NE(second.get(), address);
        }
        EXPECT_EQ(share(group, nccl), second);
      },
      deadlines());
  EXPECT_EQ(nccl.await_ends(), (FakeNccl::Counts{.made = 2 * kRanks, .destroyed = 2 * kRanks}));
}

TEST(NcclConnect, ANewOneIsMadeIfARankIsOnAnotherGpu) {
  const FakeNccl nccl;
  run_ranks(
      kRanks,
      [&](Group& group) {
        const auto first = share(group, nccl);
        EXPECT_NE(share(group, nccl, /*device=*/group.rank() == 1 ? 1 : 0), first);
      },
      deadlines());
  EXPECT_EQ(nccl.await_ends().made, 2 * kRanks);
}

TEST(NcclConnect, ARankThatFailsAtOnceFailsAll) {
  FakeNccl nccl;
  nccl.set_faults({.fails_at_once = 2});
  EXPECT_THAT(shared_refusal(nccl),
              AllOf(StartsWith("rank 2: NCCL cannot connect the ranks: an error of the stand-in"),
                    HasSubstr("as the test wants"), HasSubstr("NCCL_DEBUG=INFO")));
  EXPECT_EQ(nccl.await_ends(), (FakeNccl::Counts{.made = kRanks - 1, .aborted = kRanks - 1}));
}

TEST(NcclConnect, ARankThatFailsWhileConnectingFailsAll) {
  FakeNccl nccl;
  nccl.set_faults({.fails_later = 1, .never_connected = 1});
  EXPECT_THAT(shared_refusal(nccl), StartsWith("rank 1: NCCL cannot connect the ranks"));
  EXPECT_EQ(nccl.await_ends(), (FakeNccl::Counts{.made = kRanks, .aborted = kRanks}));
}

TEST(NcclConnect, ConnectingHasADeadline) {
  FakeNccl nccl;
  nccl.set_faults({.never_connected = 3});
  EXPECT_THAT(shared_refusal(nccl, deadlines(std::chrono::seconds(3))),
              HasSubstr("NCCL has not connected the ranks within 3 s"));
  EXPECT_EQ(nccl.await_ends(), (FakeNccl::Counts{.made = kRanks, .aborted = kRanks}));
}

TEST(NcclConnect, WithoutAnIdAllFail) {
  FakeNccl nccl;
  nccl.set_faults({.refuses_id = true});
  run_ranks(
      kRanks,
      [&](Group& group) {
        EXPECT_EQ(message_of([&] { share(group, nccl); }),
                  "rank 0: ncclGetUniqueId: an error of the stand-in");
        group.agree({.operation = "meet"});
      },
      deadlines());
  EXPECT_EQ(nccl.await_ends(), FakeNccl::Counts{});
}

TEST(NcclConnect, ARefusalOfOneRankIsThatOfAll) {
  const FakeNccl nccl;
  run_ranks(
      kRanks,
      [&](Group& group) {
        const Error refusal(ErrorCode::kInvalidArgument, "no room");
        const bool refuses = group.rank() == 1;
        EXPECT_EQ(message_of([&] {
                    cuda::share_nccl_communicator(group, {.library = nccl.library(),
                                                          .config = kConfig,
                                                          .refusal = refuses ? &refusal : nullptr});
                  }),
                  "rank 1: no room");
        EXPECT_NE(share(group, nccl), nullptr);
      },
      deadlines());
}

TEST(NcclConnect, ARankWithACommunicatorOfItsCallerIsNamed) {
  const FakeNccl nccl;
  run_ranks(
      kRanks,
      [&](Group& group) {
        const std::string message = message_of(
            [&] {
              if (group.rank() != 3) share(group, nccl);
              group.agree({.operation = "plan", .config = kConfig});
            },
            ErrorCode::kMismatch);
        EXPECT_THAT(message, StartsWith("rank 3 has no nccl_comm where rank 0 has nccl_comm=own"));
      },
      deadlines());
}

// NCCL itself would wait for the rank.
TEST(NcclConnect, ARankThatLeavesWhileConnectingIsNoticed) {
  FakeNccl nccl;
  nccl.set_faults({.never_connected = 3});
  const auto outcomes = try_ranks(
      kRanks,
      [&](Group& group) {
        if (group.rank() != 3) {
          EXPECT_THAT(message_of([&] { share(group, nccl); }, ErrorCode::kPeerFailed),
                      HasSubstr("rank 3 left the group"));
          return;
        }
        const std::byte has_none{0};
        group.agree({.operation = "plan",
                     .config = kConfig + ";nccl_comm=own",
                     .body = std::span(&has_none, 1)});
        group.agree({.operation = "plan", .under_way = true});
      },
      deadlines());
  for (const std::exception_ptr& outcome : outcomes) EXPECT_EQ(outcome, nullptr);
  EXPECT_EQ(nccl.await_ends(), (FakeNccl::Counts{.made = kRanks - 1, .aborted = kRanks - 1}));
}

TEST(NcclCommunicator, AnAbortedOneSaysSo) {
  const FakeNccl nccl;
  ncclUniqueId id{};
  nccl.library().get_unique_id(&id);
  NcclCommunicator alone(nccl.library(), id, {.rank = 0, .size = 1});
  EXPECT_TRUE(alone.is_connected());
  int num_uses = 0;
  alone.use([&](ncclComm_t comm) { num_uses += comm != nullptr ? 1 : 0; });
  alone.abort();
  alone.abort();
  EXPECT_EQ(alone.async_error(), "the NCCL communicator has been aborted");
  EXPECT_EQ(message_of([&] { alone.use([&](ncclComm_t /*comm*/) { ++num_uses; }); },
                       ErrorCode::kCommunication),
            "the NCCL communicator has been aborted");
  EXPECT_EQ(num_uses, 1);
  EXPECT_EQ(nccl.await_ends(), (FakeNccl::Counts{.made = 1, .aborted = 1}));
}

TEST(NcclCommunicator, TheCallersIsNeverEnded) {
  const FakeNccl nccl;
  ncclUniqueId id{};
  nccl.library().get_unique_id(&id);
  ncclComm_t lent = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  nccl.library().comm_init_rank_config(&lent, 1, id, 0, &config);
  {
    NcclCommunicator caller(nccl.library(), lent);
    EXPECT_FALSE(caller.is_own());
    EXPECT_EQ(caller.async_error(), "");
  }
  nccl.library().comm_destroy(lent);
  EXPECT_EQ(nccl.await_ends(), (FakeNccl::Counts{.made = 1, .destroyed = 1}));
}

}  // namespace
}  // namespace crossdock
