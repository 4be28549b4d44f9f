#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

#include "layer/overlap.hpp"

namespace crossdock {
namespace {

using std::chrono::milliseconds;

TEST(BackgroundWork, RunsTasksInOrderBesideItsOwner) {
  std::vector<int> done;
  std::vector<std::thread::id> threads;
  Worker worker;
  BackgroundWork work(worker);
  std::promise<void> first_began;
  work.add([&] {
    first_began.set_value();
    done.push_back(0);
    threads.push_back(std::this_thread::get_id());
  });
  first_began.get_future().wait();  // before finish(): tasks start immediately
  for (int i = 1; i < 5; ++i) work.add([&, i] { done.push_back(i); });
  work.finish();
  EXPECT_EQ(done, (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_NE(threads[0], std::this_thread::get_id());
}

TEST(BackgroundWork, SharesTheThreadOfItsWorker) {
  Worker worker;
  std::vector<std::thread::id> threads;
  for (int repeat = 0; repeat < 3; ++repeat) {
    BackgroundWork first(worker);
    BackgroundWork second(worker);
    for (int i = 0; i < 600; ++i) {
      (i % 2 == 0 ? first : second).add([&] { threads.push_back(std::this_thread::get_id()); });
    }
    first.finish();
    second.finish();
  }
  EXPECT_EQ(std::count(threads.begin(), threads.end(), threads[0]), 1800);
}

TEST(BackgroundWork, AFailureIsThrownAtTheEndAndNothingFollowsIt) {
  bool is_done = false;
  Worker worker;
  BackgroundWork work(worker);
  std::promise<void> all_added;
  work.add([future = all_added.get_future().share()] {
    future.wait();
    throw std::runtime_error("a fault");
  });
  work.add([&] { is_done = true; });
  all_added.set_value();
  EXPECT_THROW(work.finish(), std::runtime_error);
  EXPECT_FALSE(is_done);
}

TEST(BackgroundWork, AFailureIsThrownByTheNextAdd) {
  Worker worker;
  BackgroundWork work(worker);
  work.add([] { throw std::runtime_error("a fault"); });
  bool is_thrown = false;
  for (int i = 0; i < 10000 && !is_thrown; ++i) {
    try {
      work.add([] {});
    } catch (const std::runtime_error&) {
      is_thrown = true;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(is_thrown);
}

TEST(BackgroundWork, WaitsForTheRunningTaskAndDiscardsTheOthersWhenItsOwnerFails) {
  bool first_done = false;
  bool second_done = false;
  {
    Worker worker;
    BackgroundWork work(worker);
    std::promise<void> first_began;
    work.add([&] {
      first_began.set_value();
      std::this_thread::sleep_for(milliseconds(500));
      first_done = true;
    });
    first_began.get_future().wait();
    work.add([&] { second_done = true; });
  }
  EXPECT_TRUE(first_done);
  EXPECT_FALSE(second_done);
}

}  // namespace
}  // namespace crossdock
