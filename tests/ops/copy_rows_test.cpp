#include "ops/copy_rows.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace crossdock::ops {
namespace {

ThreadPool& pool() {
  static ThreadPool three_threads(3);
  return three_threads;
}

std::vector<std::byte> numbered_rows(int64_t num_rows, int64_t row_bytes) {
  std::vector<std::byte> rows(static_cast<size_t>(num_rows * row_bytes));
  for (int64_t i = 0; i < num_rows * row_bytes; ++i) {
    rows[static_cast<size_t>(i)] = static_cast<std::byte>((i / row_bytes) * 37 + i % 251);
  }
  return rows;
}

bool is_row(const std::byte* row, const std::vector<std::byte>& x, int64_t token,
            int64_t row_bytes) {
  return std::equal(row, row + row_bytes, x.data() + token * row_bytes);
}

TEST(GatherRows, CopiesEachRowFromItsSourceToken) {
  // Routes t0{0,1} t1{1,2} t2{0,2} t3{1,2}, grouped by expert.
  const std::vector<int64_t> source_token = {0, 2, 0, 1, 3, 1, 2, 3};
  for (const int64_t row_bytes : {1, 2, 3, 4, 8, 14, 63, 64, 65, 200, 4096}) {
    const auto x = numbered_rows(4, row_bytes);
    for (const Stores stores : {Stores::kCached, Stores::kStreaming}) {
      std::vector<std::byte> rows(source_token.size() * static_cast<size_t>(row_bytes));
      gather_rows({.x = x.data(),
                   .index = source_token.data(),
                   .rows = rows.data(),
                   .num_rows = 8,
                   .row_bytes = row_bytes,
                   .stores = stores});
      for (int64_t i = 0; i < 8; ++i) {
        EXPECT_TRUE(
            is_row(rows.data() + i * row_bytes, x, source_token[static_cast<size_t>(i)], row_bytes))
            << "row " << i << " of " << row_bytes << " bytes";
      }
    }
  }
}

TEST(ScatterRows, IsTheInverseOfGather) {
  const std::vector<int64_t> index = {3, 0, 2, 1};
  for (const int64_t row_bytes : {4, 8, 12}) {
    const auto x = numbered_rows(4, row_bytes);
    std::vector<std::byte> gathered(x.size());
    std::vector<std::byte> back(x.size());
    gather_rows({.x = x.data(),
                 .index = index.data(),
                 .rows = gathered.data(),
                 .num_rows = 4,
                 .row_bytes = row_bytes});
    scatter_rows({.x = gathered.data(),
                  .index = index.data(),
                  .rows = back.data(),
                  .num_rows = 4,
                  .row_bytes = row_bytes});
    EXPECT_EQ(back, x);
  }
}

TEST(FanOut, StoresATokenInAllItsPlacesAndNowhereElse) {
  for (const int64_t row_bytes : {2, 66, 1000, 300000}) {  // the last bypasses the caches
    const auto x = numbered_rows(2, row_bytes);
    std::vector<std::byte> rows(static_cast<size_t>(4 * row_bytes), std::byte{0xee});
    const auto place = [&](int64_t row) { return rows.data() + row * row_bytes; };
    const std::vector<std::byte*> destinations = {place(3), nullptr,  place(0),
                                                  nullptr,  place(1), nullptr};
    fan_out({.x = x.data(),
             .destinations = destinations.data(),
             .T = 2,
             .K = 3,
             .row_bytes = row_bytes},
            pool());
    EXPECT_TRUE(is_row(place(3), x, 0, row_bytes));
    EXPECT_TRUE(is_row(place(0), x, 0, row_bytes));
    EXPECT_TRUE(is_row(place(1), x, 1, row_bytes));
    EXPECT_EQ(place(2)[0], std::byte{0xee});
    EXPECT_EQ(place(2)[row_bytes - 1], std::byte{0xee});
  }
}

TEST(FanOut, ManyTokensGoToTheirPlacesOnSeveralThreads) {
  constexpr int64_t kTokens = 5000;
  constexpr int64_t kRowBytes = 1000;
  const auto x = numbered_rows(kTokens, kRowBytes);
  std::vector<std::byte> rows(static_cast<size_t>(2 * kTokens * kRowBytes), std::byte{0xee});
  const auto place = [&](int64_t row) { return rows.data() + row * kRowBytes; };
  std::vector<std::byte*> destinations;
  for (int64_t t = 0; t < kTokens; ++t) {
    destinations.push_back(place(2 * kTokens - 1 - t));
    destinations.push_back(place(t));
  }
  fan_out({.x = x.data(),
           .destinations = destinations.data(),
           .T = kTokens,
           .K = 2,
           .row_bytes = kRowBytes},
          pool());
  for (int64_t t = 0; t < kTokens; ++t) {
    ASSERT_TRUE(is_row(place(t), x, t, kRowBytes)) << t;
    ASSERT_TRUE(is_row(place(2 * kTokens - 1 - t), x, t, kRowBytes)) << t;
  }
}

TEST(CopyBlocks, RegroupsFromSourceExpertToExpertSource) {
  // 2 sources x 2 local experts with counts [2,3 | 1,4].
  const std::vector<BlockCopy> blocks = {{0, 0, 2}, {2, 3, 3}, {5, 2, 1}, {6, 6, 4}};
  std::vector<int64_t> from(10);
  std::iota(from.begin(), from.end(), 0);
  std::vector<int64_t> to(10, -1);
  copy_blocks({.from = reinterpret_cast<const std::byte*>(from.data()),
               .to = reinterpret_cast<std::byte*>(to.data()),
               .blocks = blocks,
               .row_bytes = 8});
  EXPECT_EQ(to, (std::vector<int64_t>{0, 1, 5, 2, 3, 4, 6, 7, 8, 9}));
}

TEST(CopyRows, EmptyInputsMayHaveNullPointers) {
  gather_rows({.row_bytes = 64});
  scatter_rows({.row_bytes = 64});
  fan_out({.K = 2, .row_bytes = 64}, pool());
  copy_blocks({.blocks = {}, .row_bytes = 64});
}

TEST(CopyBytes, StreamingStoresNeedNoAlignment) {
  const auto from = numbered_rows(1, 1000);
  for (int64_t shift = 0; shift < 65; ++shift) {
    for (const int64_t size : {0, 1, 127, 128, 129, 500}) {
      std::vector<std::byte> to(1000, std::byte{0xee});
      copy_bytes(to.data() + shift, from.data() + 3, size, Stores::kStreaming);
      finish_stores();
      EXPECT_TRUE(std::equal(to.data() + shift, to.data() + shift + size, from.data() + 3));
      EXPECT_EQ(to[static_cast<size_t>(shift + size)], std::byte{0xee});
      if (shift > 0) {
        EXPECT_EQ(to[static_cast<size_t>(shift - 1)], std::byte{0xee});
      }
    }
  }
}

}  // namespace
}  // namespace crossdock::ops
