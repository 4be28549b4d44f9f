#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "core/block_ledger.hpp"

namespace crossdock {
namespace {

TEST(FreeRanges, HasNothingAtFirst) {
  FreeRanges ranges;
  EXPECT_EQ(ranges.take(1), std::nullopt);
  EXPECT_EQ(ranges.bytes_before(0), 0);
}

TEST(FreeRanges, TakesFromTheBeginningOfAPart) {
  FreeRanges ranges;
  ranges.give_back(0, 100);
  EXPECT_EQ(ranges.take(30), 0);
  EXPECT_EQ(ranges.take(70), 30);
  EXPECT_EQ(ranges.take(1), std::nullopt);
}

TEST(FreeRanges, TakesFromTheSmallestPartThatIsLargeEnough) {
  FreeRanges ranges;
  ranges.give_back(0, 50);
  ranges.give_back(100, 20);
  ranges.give_back(200, 30);
  ranges.give_back(300, 20);
  EXPECT_EQ(ranges.take(25), 200);
  EXPECT_EQ(ranges.take(20), 100);
  EXPECT_EQ(ranges.take(20), 300);
  EXPECT_EQ(ranges.take(50), 0);
}

TEST(FreeRanges, JoinsNeighboursOnBothSides) {
  FreeRanges ranges;
  ranges.give_back(0, 10);
  ranges.give_back(20, 10);
  EXPECT_EQ(ranges.take(11), std::nullopt);
  ranges.give_back(10, 10);
  EXPECT_EQ(ranges.take(30), 0);
}

TEST(FreeRanges, GrowsByWhatIsGivenBackBeyondTheEnd) {
  FreeRanges ranges;
  ranges.give_back(0, 64);
  EXPECT_EQ(ranges.take(40), 0);
  EXPECT_EQ(ranges.bytes_before(64), 24);
  EXPECT_EQ(ranges.bytes_before(40), 0);
  ranges.give_back(64, 36);
  EXPECT_EQ(ranges.bytes_before(100), 60);
  EXPECT_EQ(ranges.take(60), 40);
  EXPECT_EQ(ranges.bytes_before(100), 0);
}

// Ranges taken at random never overlap; once all are returned, they merge into one.
TEST(FreeRanges, NeverHandsOutAByteTwiceAndLosesNone) {
  constexpr int64_t kBytes = 4096;
  std::mt19937 random(7);
  FreeRanges ranges;
  ranges.give_back(0, kBytes);
  std::map<int64_t, int64_t> taken;
  std::vector<bool> is_taken(kBytes, false);
  const auto mark = [&](int64_t offset, int64_t num_bytes, bool value) {
    for (int64_t i = offset; i < offset + num_bytes; ++i) {
      ASSERT_NE(is_taken[static_cast<size_t>(i)], value) << "byte " << i;
      is_taken[static_cast<size_t>(i)] = value;
    }
  };
  for (int step = 0; step < 20000; ++step) {
    const int64_t num_bytes = 1 + static_cast<int64_t>(random() % 300);
    if (random() % 2 == 0) {
      const std::optional<int64_t> offset = ranges.take(num_bytes);
      if (!offset) continue;
      mark(*offset, num_bytes, true);
      taken.emplace(*offset, num_bytes);
    } else if (!taken.empty()) {
      const auto released = std::next(taken.begin(), static_cast<int64_t>(random() % taken.size()));
      mark(released->first, released->second, false);
      ranges.give_back(released->first, released->second);
      taken.erase(released);
    }
    if (HasFatalFailure()) return;
  }
  for (const auto& [offset, num_bytes] : taken) ranges.give_back(offset, num_bytes);
  EXPECT_EQ(ranges.take(kBytes), 0);
}

}  // namespace
}  // namespace crossdock
