#include "bench/measure.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "crossdock/threads.hpp"

namespace crossdock::bench {
namespace {

using std::chrono::milliseconds;

// Runs on 3 ranks and returns the result of rank 0.
std::vector<StepResult> measure_on_ranks(
    const std::function<std::vector<Step>(const Group&)>& steps, const Repeats& repeats) {
  std::vector<StepResult> results;
  run_ranks(3, [&](Group& group) {
    auto own = measure(group, steps(group), repeats);
    if (group.rank() == 0) results = std::move(own);
  });
  return results;
}

TEST(Measure, TakesTheTimeOfTheSlowestRank) {
  const auto results = measure_on_ranks(
      [](const Group& group) -> std::vector<Step> {
        const milliseconds time(group.rank() == 1 ? 40 : 1);
        return {
            {.name = "sleep", .bytes = 8, .run = [time] { std::this_thread::sleep_for(time); }}};
      },
      {.warm_up = 0, .timed = 3});
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].name, "sleep");
  EXPECT_GE(results[0].min_us, 40e3);
  EXPECT_GE(results[0].median_us, results[0].min_us);
  EXPECT_GE(results[0].max_us, results[0].median_us);
}

TEST(Measure, LeavesOutTheWarmUp) {
  const auto results = measure_on_ranks(
      [](const Group&) -> std::vector<Step> {
        auto runs = std::make_shared<int>(0);
        return {{.name = "fast at first", .bytes = 8, .run = [runs] {
                   if (++*runs > 2) std::this_thread::sleep_for(milliseconds(40));
                 }}};
      },
      {.warm_up = 2, .timed = 3});
  EXPECT_GE(results[0].min_us, 40e3);
}

// No memory copies a terabyte per second, but a copy of another step's bytes would appear to.
TEST(Measure, MeasuresACopyOfTheBytesOfEveryStep) {
  const auto results = measure_on_ranks(
      [](const Group&) -> std::vector<Step> {
        return {{.name = "small", .bytes = 1 << 16, .run = [] {}},
                {.name = "large", .bytes = 1 << 27, .num_written = 1 << 26, .run = [] {}}};
      },
      {.warm_up = 1, .timed = 5});
  ASSERT_EQ(results.size(), 2U);
  EXPECT_GT(results[0].copy_us, 0.0);
  EXPECT_GT(results[1].copy_us, (1 << 27) / 1e6);
  EXPECT_EQ(results[1].bytes, 1 << 27);
  EXPECT_DOUBLE_EQ(results[1].ratio(), results[1].median_us / results[1].copy_us);
  EXPECT_EQ(results[0].traffic_us, 0.0);  // num_written is not set
  EXPECT_GT(results[1].traffic_us, (1 << 27) / 1e6);
  EXPECT_DOUBLE_EQ(results[1].traffic_ratio(), results[1].median_us / results[1].traffic_us);
}

}  // namespace
}  // namespace crossdock::bench
