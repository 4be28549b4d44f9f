// What the store of rank 0 does with ranks that give up, and with strangers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "comm/polled/control_message.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/socket.hpp"
#include "comm/sockets/store.hpp"
#include "comm/sockets_ranks.hpp"

namespace crossdock::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

int some_port() {
  const auto listener = comm::listen_at(*comm::parse_address("127.0.0.1", 0));
  return std::min(comm::address_of(*listener).port, 65000);
}

comm::StoreArgs args_of(int rank, int size, int port) {
  return {.host = "127.0.0.1",
          .port = port,
          .key = 5,
          .rank = rank,
          .size = size,
          .blob = std::vector<std::byte>(100, static_cast<std::byte>(rank)),
          .deadline = kAmple};
}

/// A connection to the store; waits until there is a store.
comm::Socket connect_to(int port) {
  const auto address = *comm::parse_address("127.0.0.1", port);
  for (const auto end = std::chrono::steady_clock::now() + kAmple;
       std::chrono::steady_clock::now() < end;) {
    int error = 0;
    comm::Socket socket = comm::start_connecting(address, error);
    pollfd ready{.fd = socket.descriptor(), .events = POLLOUT, .revents = 0};
    if (error == 0 && ::poll(&ready, 1, 1000) == 1 && comm::connect_error(socket) == 0) {
      return socket;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ADD_FAILURE() << "no store";
  return {};
}

TEST(Store, SilentStrangersDoNotDelayTheRanks) {
  const int port = some_port();
  constexpr int kStrangers = 300;  // would fill the store for 40 s
  comm::StoreArgs of_rank_0 = args_of(0, 2, port);
  of_rank_0.deadline = std::chrono::seconds(30);
  Outcome outcome;
  std::jthread store([&] { outcome = outcome_of([&] { comm::exchange_blobs(of_rank_0); }); });
  std::vector<comm::Socket> strangers;
  for (int i = 0; i < kStrangers; ++i) strangers.push_back(connect_to(port));
  comm::StoreArgs of_rank_1 = args_of(1, 2, port);
  of_rank_1.deadline = of_rank_0.deadline;
  const Outcome late = outcome_of([&] { comm::exchange_blobs(of_rank_1); });
  EXPECT_FALSE(late.threw) << late.message;
  store.join();
  EXPECT_FALSE(outcome.threw) << outcome.message;
}

TEST(Store, ARankThatGivesUpTellsAllOthersForWhomItWaited) {
  const int port = some_port();
  std::vector<Outcome> outcomes(3);
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        comm::StoreArgs args = args_of(rank, 5, port);
        if (rank == 1) args.deadline = kShort;
        outcomes[static_cast<size_t>(rank)] = outcome_of([&] { comm::exchange_blobs(args); });
      });
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    const Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    EXPECT_EQ(outcome.code, ErrorCode::kTimeout);
    EXPECT_EQ(outcome.culprit, 3);
    EXPECT_THAT(outcome.message, HasSubstr("rank " + std::to_string(rank) +
                                           " of 5: waited 1 s for ranks 3, 4 to start"));
  }
}

TEST(Store, AnInterruptedRankTellsAllOthers) {
  const int port = some_port();
  std::vector<Outcome> outcomes(3);
  const auto run = [&](int rank) {
    comm::StoreArgs args = args_of(rank, 4, port);
    if (rank == 2) {  // by its 40th look, each of 50 ms, the store has accepted it
      args.interrupt = [num_calls = 0]() mutable { return ++num_calls > 40; };
    }
    outcomes[static_cast<size_t>(rank)] = outcome_of([&] { comm::exchange_blobs(args); });
  };
  {
    std::jthread rank_0(run, 0);
    std::jthread rank_1(run, 1);
    const comm::Socket probe = connect_to(port);  // there is a store
    std::jthread rank_2(run, 2);
  }
  EXPECT_EQ(outcomes[2].message, "rank 2 of 4: interrupted while waiting for rank 3 to start");
  for (const int rank : {0, 1}) {
    const Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    EXPECT_EQ(outcome.culprit, 2);
    EXPECT_EQ(outcome.message,
              "rank " + std::to_string(rank) +
                  " of 4: rank 2 gave up: interrupted while waiting for rank 3 to start");
  }
}

TEST(Store, ARankOfAnotherVersionEndsTheSetUpOfAll) {
  const int port = some_port();
  std::vector<Outcome> outcomes(2);
  std::string answer;
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        outcomes[static_cast<size_t>(rank)] =
            outcome_of([&] { comm::exchange_blobs(args_of(rank, 3, port)); });
      });
    }
    const comm::Socket foreign = connect_to(port);
    const comm::StoreRequest request{
        .version = comm::kSocketsVersion + 1, .key = 5, .rank = 2, .size = 3, .blob_bytes = 7};
    EXPECT_EQ(send(foreign.descriptor(), &request, sizeof request, 0),
              static_cast<ssize_t>(sizeof request));
    pollfd ready{.fd = foreign.descriptor(), .events = POLLIN, .revents = 0};
    ::poll(&ready, 1, 60000);
    char bytes[1024];
    const ssize_t got = recv(foreign.descriptor(), bytes, sizeof bytes, 0);
    if (got > 0) answer.assign(bytes, static_cast<size_t>(got));
  }
  EXPECT_THAT(answer, HasSubstr("rank 2 runs another version of Crossdock than rank 0"));
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kMismatch) << outcome.message;
    EXPECT_EQ(outcome.culprit, 2);
    EXPECT_THAT(outcome.message, HasSubstr("rank 2 runs another version of Crossdock"));
  }
}

TEST(Store, IgnoresARefusalThatIsNone) {
  const int port = some_port();
  std::vector<Outcome> outcomes(2);
  const auto run = [&](int rank) {
    outcomes[static_cast<size_t>(rank)] =
        outcome_of([&] { comm::exchange_blobs(args_of(rank, 2, port)); });
  };
  {
    std::jthread rank_0(run, 0);
    const comm::Socket stranger = connect_to(port);
    std::vector<std::byte> bytes(sizeof(comm::StoreRequest) + sizeof(comm::ControlMessage),
                                 std::byte{0xff});
    const comm::StoreRequest request{
        .version = comm::kSocketsVersion, .key = 5, .rank = 1, .size = 2, .blob_bytes = 0};
    std::memcpy(bytes.data(), &request, sizeof request);
    EXPECT_EQ(send(stranger.descriptor(), bytes.data(), bytes.size(), 0), std::ssize(bytes));
    std::jthread rank_1(run, 1);
  }
  for (const Outcome& outcome : outcomes) EXPECT_FALSE(outcome.threw) << outcome.message;
}

TEST(Store, SaysOnEveryRankForWhomItWaits) {
  const int port = some_port();
  std::vector<std::vector<WaitNotice>> notices(2);
  std::atomic<int> num_noticed = 0;
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        auto& own = notices[static_cast<size_t>(rank)];
        comm::StoreArgs args = args_of(rank, 4, port);
        args.notice_after = std::chrono::seconds(3);  // by then rank 1 knows who is missing
        args.on_wait = [&](const WaitNotice& notice) {
          own.push_back(notice);
          ++num_noticed;
        };
        comm::exchange_blobs(args);
      });
    }
    while (num_noticed < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ranks.emplace_back([&] { comm::exchange_blobs(args_of(2, 4, port)); });
    ranks.emplace_back([&] { comm::exchange_blobs(args_of(3, 4, port)); });
  }
  for (int rank = 0; rank < 2; ++rank) {
    const auto& own = notices[static_cast<size_t>(rank)];
    ASSERT_EQ(own.size(), 1U);
    EXPECT_EQ(own.front().rank, rank);
    EXPECT_EQ(own.front().operation, "set-up");
    EXPECT_EQ(own.front().awaited, (std::vector<int>{2, 3}));
    EXPECT_THAT(own.front().text(), AllOf(HasSubstr("waiting for ranks 2, 3 to start for "),
                                          HasSubstr("gives up in ")));
  }
}

}  // namespace
}  // namespace crossdock::testing
