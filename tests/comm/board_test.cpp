// How thread ranks wait for each other, asleep or spinning.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads/communicator.hpp"

namespace crossdock::comm {
namespace {

using ::testing::Each;
using ::testing::Eq;
using ::testing::HasSubstr;

constexpr int kRanks = 4;
constexpr WaitContext kAmple{.operation = "test",
                             .sequence = 1,
                             .arrival = std::chrono::seconds(60),
                             .progress = std::chrono::seconds(60)};

Clock::time_point in_a_minute() {
  return Clock::now() + std::chrono::minutes(1);
}

bool never() {
  return false;
}

// Two threads take turns; a thread that missed its turn would wait for a minute.
void take_turns(bool may_spin, bool is_rung) {
  Bell bell(may_spin);
  std::atomic<int> turn{0};
  const auto play = [&](int player) {
    const auto is_my_turn = [&] { return turn.load() % 2 == player; };
    for (int move = 0; move < 2000; ++move) {
      for (;;) {
        const uint32_t seen = bell.read();
        if (is_my_turn()) break;
        if (is_rung) {
          bell.wait(seen, in_a_minute(), never);
        } else {
          bell.wait(seen, in_a_minute(), is_my_turn);
        }
      }
      turn.fetch_add(1);
      if (is_rung) {
        bell.ring();
      } else {
        bell.wake();
      }
    }
  };
  const auto begin = Clock::now();
  std::jthread other(play, 1);
  play(0);
  other.join();
  EXPECT_EQ(turn, 4000);
  EXPECT_LT(Clock::now() - begin, std::chrono::minutes(1));
}

TEST(Bell, MissesNothing) {
  for (const bool may_spin : {false, true}) {
    for (const bool is_rung : {false, true}) take_turns(may_spin, is_rung);
  }
}

TEST(Bell, WaitsNoLongerThanItsDeadline) {
  for (const bool may_spin : {false, true}) {
    Bell bell(may_spin);
    bell.wait(bell.read(), Clock::now() - std::chrono::seconds(1), never);
    bell.wait(bell.read(), Clock::now() + std::chrono::milliseconds(1), never);
  }
}

// How a rank ended: the exchanges that it completed, and the error that stopped it.
struct End {
  uint64_t num_exchanges = 0;
  std::string message;
};

// Every rank makes exchanges until its limit or an error. `meanwhile` runs concurrently.
std::vector<End> run(
    ThreadBoard& board, const std::vector<uint64_t>& limits, const WaitContext& wait,
    const std::function<void()>& meanwhile = [] {}) {
  std::vector<End> ends(kRanks);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      End& end = ends[static_cast<size_t>(rank)];
      try {
        while (end.num_exchanges < limits[static_cast<size_t>(rank)]) {
          const uint64_t n = end.num_exchanges + 1;
          board.post_of(rank, n).set_inlined(std::as_bytes(std::span(&n, 1)));
          board.post(rank, n);
          board.await_all_posted(rank, n, wait);
          for (int peer = 0; peer < kRanks; ++peer) {
            uint64_t theirs = 0;
            std::memcpy(&theirs, board.post_of(peer, n).part_for(rank).data(), sizeof(theirs));
            if (theirs != n) throw std::runtime_error("a post of another exchange");
          }
          end.num_exchanges = n;
        }
        board.leave(rank, "done");
      } catch (const std::exception& error) {
        end.message = error.what();
      }
    });
  }
  meanwhile();
  threads.clear();
  return ends;
}

constexpr uint64_t kForever = ~uint64_t{0};

TEST(ThreadBoard, AFailureStopsAllRanksAfterTheSameExchange) {
  for (int trial = 0; trial < 100; ++trial) {
    ThreadBoard board(kRanks, Topology::single_node(kRanks), /*may_spin=*/trial % 2 == 0);
    const auto ends = run(board, std::vector<uint64_t>(kRanks, kForever), kAmple, [&] {
      std::this_thread::sleep_for(std::chrono::microseconds(37 * (trial % 20)));
      board.fail({.culprit = 2, .reporter = 2, .operation = "test", .text = "no more"});
    });
    for (const End& end : ends) {
      EXPECT_EQ(end.num_exchanges, ends[0].num_exchanges);
      EXPECT_THAT(end.message, HasSubstr("no more"));
    }
  }
}

TEST(ThreadBoard, ARankThatLeavesIsNamedInTheNextExchange) {
  for (int trial = 0; trial < 20; ++trial) {
    ThreadBoard board(kRanks, Topology::single_node(kRanks), /*may_spin=*/trial % 2 == 0);
    std::vector<uint64_t> limits(kRanks, kForever);
    limits[1] = 50;
    const auto ends = run(board, limits, kAmple);
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      EXPECT_EQ(ends[rank].num_exchanges, 50U);
      if (rank == 1) continue;
      EXPECT_THAT(ends[rank].message, HasSubstr("rank 1 left the group (done)"));
    }
  }
}

TEST(ThreadBoard, ALateRankIsNamedAtTheDeadline) {
  for (const bool may_spin : {false, true}) {
    ThreadBoard board(kRanks, Topology::single_node(kRanks), may_spin);
    WaitContext wait = kAmple;
    wait.arrival = std::chrono::milliseconds(300);
    std::vector<End> ends(2);
    std::vector<std::jthread> threads;
    for (const int rank : {0, 3}) {  // the others never arrive
      threads.emplace_back([&, rank] {
        try {
          board.post(rank, 1);
          board.await_all_posted(rank, 1, wait);
        } catch (const Error& error) {
          ends[rank == 0 ? 0 : 1].message = error.what();
        }
      });
    }
    threads.clear();
    for (const End& end : ends) EXPECT_THAT(end.message, HasSubstr("for rank 1 to arrive at test"));
  }
}

// Slower ranks may still read the post of the exchange before the one that failed.
TEST(ThreadBoard, AfterAFailureNoPostIsWritten) {
  const auto board = std::make_shared<ThreadBoard>(2, Topology::single_node(2), /*may_spin=*/false);
  ThreadCommunicator communicator(board, /*rank=*/0);
  const uint64_t earlier = 7;
  board->post_of(0, 1).set_inlined(std::as_bytes(std::span(&earlier, 1)));
  board->fail({.culprit = 1, .reporter = 1, .operation = "test", .text = "no more"});

  const auto memory = std::make_shared<std::vector<std::byte>>(16);
  const std::vector<int64_t> offsets = {0, 8, 16};
  EXPECT_THROW(communicator.all_gather_v({memory->data(), 8, memory}, {memory->data(), 16, memory},
                                         offsets, kAmple),
               Error);
  uint64_t found = 0;
  std::memcpy(&found, board->post_of(0, 1).part_for(1).data(), sizeof(found));
  EXPECT_EQ(found, earlier);
}

TEST(ThreadBoard, SendsLargerThanAPostAreReadBeforeTheSenderGoesOn) {
  ThreadBoard board(kRanks, Topology::single_node(kRanks), /*may_spin=*/false);
  std::vector<int> sums(kRanks, 0);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<std::byte> own(1000);
      for (uint64_t n = 1; n <= 200; ++n) {
        std::fill(own.begin(), own.end(), static_cast<std::byte>(n));
        ThreadPost& post = board.post_of(rank, n);
        post.is_inlined = rank % 2 == 0;
        post.data = own.data();
        post.num_bytes = std::ssize(own);
        if (post.is_inlined) post.set_inlined(own);
        board.post(rank, n);
        board.await_all_posted(rank, n, kAmple);
        for (int peer = 0; peer < kRanks; ++peer) {
          const auto part = board.post_of(peer, n).part_for(rank);
          const auto wanted = static_cast<std::byte>(n);
          sums[static_cast<size_t>(rank)] +=
              static_cast<int>(std::count(part.begin(), part.end(), wanted));
        }
        board.finish_reading(rank, n);
      }
    });
  }
  threads.clear();
  EXPECT_THAT(sums, Each(Eq(200 * kRanks * 1000)));
}

}  // namespace
}  // namespace crossdock::comm
