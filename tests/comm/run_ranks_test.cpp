// Ranks as threads of this process.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <limits>
#include <new>
#include <thread>

#include "crossdock/threads.hpp"
#include "support/missing_memory.hpp"

namespace crossdock {
namespace {

TEST(RunRanks, RunsTheBodyOncePerRank) {
  std::atomic<int> ranks_seen = 0;
  run_ranks(5, [&](Group& group) {
    EXPECT_EQ(group.size(), 5);
    EXPECT_EQ(group.communicator().name(), "threads");
    EXPECT_TRUE(group.communicator().shares_address_space());
    ranks_seen |= 1 << group.rank();
  });
  EXPECT_EQ(ranks_seen, 0b11111);
}

TEST(RunRanks, AnExceptionArrivesWithoutMemoryForItsReason) {
  const auto fail = [](Group& /*group*/) {
    MissingSmallMemory::begin();
    throw std::bad_alloc();
  };
  EXPECT_THROW(run_ranks(1, fail), std::bad_alloc);
}

TEST(RunRanks, RefusesNumbersOfRanksThatCannotBe) {
  for (const int size : {-1, 0, 65537, std::numeric_limits<int>::max()}) {
    EXPECT_THROW(static_cast<void>(make_thread_communicators(size)), Error) << size;
  }
}

TEST(RunRanks, ThrowsWhatTheFirstRankToFailThrew) {
  try {
    run_ranks(4, [](Group& group) {
      group.agree({.operation = "plan"});
      if (group.rank() == 2) throw std::out_of_range("rank 2 was here");
      group.agree({.operation = "plan"});
    });
    FAIL() << "should have thrown";
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "rank 2 was here");
  }
}

TEST(RunRanks, AnythingMayBeThrown) {
  const auto errors = try_ranks(2, [](Group& group) {
    if (group.rank() == 0) throw 7;
    group.agree({.operation = "plan"});
  });
  EXPECT_THROW(std::rethrow_exception(errors[0]), int);
  EXPECT_THROW(std::rethrow_exception(errors[1]), Error);
}

TEST(RunRanks, ReportsEachRanksEnd) {
  const auto errors = try_ranks(3, [](Group& group) {
    if (group.rank() == 1) throw std::runtime_error("only I");
  });
  EXPECT_EQ(errors[0], nullptr);
  EXPECT_NE(errors[1], nullptr);
  EXPECT_EQ(errors[2], nullptr);
}

TEST(RunRanks, NeedsAtLeastOneRank) {
  EXPECT_THROW(run_ranks(0, [](Group&) {}), Error);
}

TEST(RunRanks, MayBeNested) {
  run_ranks(2, [](Group& outer) {
    run_ranks(3, [](Group& inner) { inner.agree({.operation = "inner"}); });
    outer.agree({.operation = "outer"});
  });
}

TEST(ThreadRanks, MayBeSpreadOverNodes) {
  run_ranks(5,
            [](Group& group) {
              EXPECT_EQ(group.topology().node_of_rank, (std::vector{0, 0, 1, 1, 2}));
              const Buffer memory(500);
              const SharedBytes send{memory.data(), 10, memory.owner()};
              const SharedBytes recv{memory.data() + 100, 50, memory.owner()};
              std::fill_n(memory.data(), 10, std::byte{1});
              group.all_gather_v(send, recv, std::vector<int64_t>{0, 10, 20, 30, 40, 50},
                                 group.wait_context("gather", 1));
              const bool has_neighbour = group.rank() < 4;
              EXPECT_EQ(group.communicator().traffic().bytes_within_node, has_neighbour ? 10 : 0);
              EXPECT_EQ(group.communicator().traffic().bytes_between_nodes,
                        has_neighbour ? 30 : 40);
            },
            {.ranks_per_node = 2, .group = {}});
}

TEST(ThreadRanks, KeepMemoryUntilTheLastHasLeft) {
  auto communicators = make_thread_communicators(2);
  const std::weak_ptr<const void> watched = [&] {
    const auto memory = std::make_shared<const int>(5);
    communicators[0]->keep_alive(memory);
    return std::weak_ptr<const void>(memory);
  }();
  communicators[0].reset();
  EXPECT_FALSE(watched.expired());
  communicators[1]->leave("done");
  EXPECT_TRUE(watched.expired());
}

// Ends the process if `work` hangs: threads that wait for each other can be neither joined nor
// detached.
void run_watched(const std::function<void()>& work) {
  auto done = std::async(std::launch::async, work);
  if (done.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
    std::fputs("hangs\n", stderr);
    std::_Exit(1);
  }
  done.get();
}

TEST(ThreadRanks, MayRunInsideABodyOfTheirPool) {
  for (const auto& pool : {ThreadPool::process_wide(), std::make_shared<ThreadPool>(3)}) {
    std::atomic<int64_t> runs = 0;
    const int64_t count = 2 * pool->num_threads() + 1;
    run_watched([&] {
      pool->parallel_for(count, [&](int64_t) {
        run_ranks(2,
                  [&](Group& group) {
                    group.threads()->parallel_for(5, [&](int64_t) { ++runs; });
                    group.agree({.operation = "meet"});
                    group.threads()->parallel_for(5, [&](int64_t) { ++runs; });
                  },
                  {.ranks_per_node = 0, .group = {.threads = pool}});
      });
    });
    EXPECT_EQ(runs, count * 2 * 10);
  }
}

TEST(ThreadRanks, OnWorkersOfAPoolWaitForRanksThatNeedIt) {
  const auto pool = std::make_shared<ThreadPool>(2);
  std::vector<std::unique_ptr<Group>> groups;
  for (auto& communicator : make_thread_communicators(4)) {
    groups.push_back(std::make_unique<Group>(
        std::move(communicator),
        GroupOptions{.arrival_deadline = std::chrono::seconds(20), .threads = pool}));
  }
  std::atomic<int> num_on_workers = 0;
  std::atomic<int> runs = 0;
  std::vector<std::jthread> others;
  others.reserve(2);
  for (size_t rank = 2; rank < 4; ++rank) {
    others.emplace_back([&, rank] {
      while (num_on_workers < 2) std::this_thread::yield();
      pool->parallel_for(4, [&](int64_t) { ++runs; });
      EXPECT_NO_THROW(groups[rank]->agree({.operation = "meet"}));
    });
  }
  EXPECT_NO_THROW(pool->parallel_for(2, [&](int64_t rank) {
    ++num_on_workers;
    groups[static_cast<size_t>(rank)]->agree({.operation = "meet"});
  }));
  others.clear();
  EXPECT_EQ(runs, 8);
}

TEST(ThreadRanks, ReportSizesThatDoNotMatch) {
  const auto errors = try_ranks(2, [](Group& group) {
    const Buffer memory(100000);
    const SharedBytes bytes{memory.data(), 100000, memory.owner()};
    const int64_t own = group.rank() == 0 ? 50000 : 40000;  // rank 1 expects less than rank 0 sends
    const std::vector<int64_t> offsets =
        group.rank() == 0 ? std::vector<int64_t>{0, 0, own} : std::vector<int64_t>{0, own, own};
    const std::vector<int64_t> none = {0, 0, 0};
    std::fill_n(memory.data(), 100000, std::byte{0});
    group.all_to_all_v(bytes, group.rank() == 0 ? offsets : none, bytes,
                       group.rank() == 0 ? none : offsets, group.wait_context("odd", 1));
    group.agree({.operation = "next"});
  });
  for (const auto& error : errors) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& caught) {
      EXPECT_NE(std::string(caught.what())
                    .find("rank 0 sent 50000 bytes to rank 1, which expected 40000"),
                std::string::npos)
          << caught.what();
      EXPECT_EQ(caught.context().culprit, 0);
    }
  }
}

}  // namespace
}  // namespace crossdock
