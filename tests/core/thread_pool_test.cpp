#include "crossdock/thread_pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "crossdock/error.hpp"
#include "support/forked_child.hpp"

namespace crossdock {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (const int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    for (const int64_t count : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
      pool.parallel_for(count, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (const auto& n : runs) EXPECT_EQ(n, 1);
    }
  }
}

TEST(ThreadPool, ServesManyCallersWithNoMoreThreadsThanItsSize) {
  ThreadPool pool(2);
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  std::atomic<int> total = 0;
  std::vector<std::thread> callers;
  callers.reserve(5);
  for (int c = 0; c < 5; ++c) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        pool.parallel_for(4, [&](int64_t) {
          const int now = ++running;
          int seen = most;
          while (now > seen && !most.compare_exchange_weak(seen, now)) {
          }
          std::this_thread::yield();
          ++total;
          --running;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 5 * 20 * 4);
  EXPECT_LE(most, 2);
}

TEST(ThreadPool, PassesAnExceptionOnAndStaysUsable) {
  ThreadPool pool(2);
  std::atomic<int> runs = 0;
  const auto fails = [&](int64_t i) {
    ++runs;
    if (i == 3) throw std::runtime_error("three");
  };
  EXPECT_THROW(pool.parallel_for(1000, fails), std::runtime_error);
  EXPECT_LE(runs, 1000);
  runs = 0;
  pool.parallel_for(10, [&](int64_t) { ++runs; });
  EXPECT_EQ(runs, 10);
}

TEST(ThreadPool, LeavesOutWhatHasNotBegunWhenABodyThrows) {
  ThreadPool pool(2);
  std::atomic<int> runs = 0;
  const auto fails = [&](int64_t i) {
    if (i == 0) throw std::runtime_error("the first");
    ++runs;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  EXPECT_THROW(pool.parallel_for(5000, fails), std::runtime_error);
  EXPECT_LT(runs, 4999);
}

TEST(ThreadPool, RunsInPlaceInsideABody) {
  ThreadPool pool(2);
  std::atomic<int> runs = 0;
  pool.parallel_for(4, [&](int64_t) { pool.parallel_for(4, [&](int64_t) { ++runs; }); });
  EXPECT_EQ(runs, 16);
}

TEST(ThreadPool, GivesTheNextTurnToWorkThatPeersWaitFor) {
  ThreadPool pool(2);
  constexpr int kMany = 4000;
  std::atomic<int> runs = 0;
  std::thread other([&] {
    pool.parallel_for(kMany, [&](int64_t) {
      ++runs;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  });
  while (runs == 0) std::this_thread::yield();
  pool.parallel_for(
      2, [](int64_t) {}, Turn::kNext);
  EXPECT_LT(runs, kMany);
  other.join();
  EXPECT_EQ(runs, kMany);
}

// The threads do not exist in the child: waiting for them would never end.
TEST(ThreadPool, OfAParentRunsOnTheCallingThreadOfAForkedChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow forks";
#endif
  auto pool = std::make_unique<ThreadPool>(2);
  pool->parallel_for(4, [](int64_t) {});
  EXPECT_EQ(exit_status_of_child([&] {
              int runs = 0;
              pool->parallel_for(4, [&](int64_t) { ++runs; });
              pool.reset();
              return runs;
            }),
            4);
}

TEST(ThreadPool, RefusesASizeThatCannotBe) {
  for (const int num_threads : {-1, 4097, std::numeric_limits<int>::max()}) {
    EXPECT_THROW(ThreadPool{num_threads}, Error) << num_threads;
  }
}

TEST(ThreadPool, OfTheProcessIsOne) {
  EXPECT_EQ(ThreadPool::process_wide(), ThreadPool::process_wide());
  EXPECT_GE(ThreadPool::process_wide()->num_threads(), 1);
}

}  // namespace
}  // namespace crossdock
