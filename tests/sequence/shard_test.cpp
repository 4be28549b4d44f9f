#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "crossdock/cuda.hpp"
#include "sequence/layouts.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using Tokens = std::vector<int64_t>;

Tokens tokens_of(const SequenceShard& shard) {
  Tokens tokens;
  for (int64_t i = 0; i < shard.num_tokens(); ++i) tokens.push_back(shard.global_index(i));
  return tokens;
}

std::vector<Tokens> tokens_of(const SequenceLayout& layout) {
  std::vector<Tokens> ranks;
  for (int r = 0; r < layout.num_ranks; ++r) ranks.push_back(tokens_of(SequenceShard(layout, r)));
  return ranks;
}

Tokens lengths_of(const SequenceLayout& layout) {
  Tokens lengths;
  for (const Tokens& tokens : tokens_of(layout)) lengths.push_back(std::ssize(tokens));
  return lengths;
}

/// Where each rank puts its tokens.
using Placement = std::function<Tokens(const SequenceShard&)>;

/// Every rank puts its tokens, which are known by definition, into one global tensor. Returns what
/// is wrong with it, or "".
std::string find_fault(const SequenceLayout& layout, const Placement& placement) {
  const int64_t T = SequenceShard(layout, 0).num_global_tokens();
  Tokens global(static_cast<size_t>(T), -1);
  for (int rank = 0; rank < layout.num_ranks; ++rank) {
    const Tokens values = expected_tokens(layout, rank);
    const Tokens places = placement(SequenceShard(layout, rank));
    if (places.size() != values.size()) return "rank " + std::to_string(rank) + " has other tokens";
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i] < 0 || places[i] >= T) return "a token has no place";
      int64_t& place = global[static_cast<size_t>(places[i])];
      if (place != -1) return "two tokens have one place";
      place = values[i];
    }
  }
  for (int64_t t = 0; t < T; ++t) {
    if (global[static_cast<size_t>(t)] != t) return "token " + std::to_string(t) + " is elsewhere";
  }
  return {};
}

TEST(SequenceShard, WorkedVectors) {
  EXPECT_THAT(tokens_of(SequenceLayout{.batch = 2, .length = 4, .num_ranks = 2}),
              testing::ElementsAre(Tokens{0, 1, 4, 5}, Tokens{2, 3, 6, 7}));
  EXPECT_THAT(tokens_of(SequenceLayout{.batch = 2, .length = 5, .num_ranks = 2}),
              testing::ElementsAre(Tokens{0, 1, 2, 5, 6, 7}, Tokens{3, 4, 8, 9}));
  EXPECT_EQ(lengths_of({.length = 5, .num_ranks = 4}), (Tokens{2, 2, 1, 0}));
}

TEST(SequenceShard, SequenceFirstKeepsTheTokensOfAPositionTogether) {
  EXPECT_THAT(tokens_of(SequenceLayout{
                  .batch = 2, .length = 5, .num_ranks = 2, .order = TokenOrder::kSequenceFirst}),
              testing::ElementsAre(Tokens{0, 1, 2, 3, 4, 5}, Tokens{6, 7, 8, 9}));
}

TEST(SequenceShard, ZigzagPairsAnEarlyChunkWithALateOne) {
  const SequenceLayout even{.length = 8, .num_ranks = 2, .cut = SequenceCut::kZigzag};
  EXPECT_THAT(tokens_of(even), testing::ElementsAre(Tokens{0, 1, 6, 7}, Tokens{2, 3, 4, 5}));
  // Chunks of ceil(5 / 4) = 2: [0, 1], [2, 3], [4], [].
  const SequenceLayout uneven{.length = 5, .num_ranks = 2, .cut = SequenceCut::kZigzag};
  EXPECT_THAT(tokens_of(uneven), testing::ElementsAre(Tokens{0, 1}, Tokens{2, 3, 4}));
}

TEST(SequenceShard, PackedSequencesAreCutOneByOne) {
  // Sequences of 4 and 6 tokens; the second one is padded to 8.
  const SequenceLayout layout{
      .num_ranks = 2, .cut = SequenceCut::kZigzag, .packed = pack({4, 6}, 4)};
  EXPECT_THAT(tokens_of(layout),
              testing::ElementsAre(Tokens{0, 3, 4, 5, 10, 11}, Tokens{1, 2, 6, 7, 8, 9}));
}

TEST(SequenceShard, PlacesEveryTokenOnceForAllDenseLayouts) {
  for_dense_layouts([](const SequenceLayout& layout) {
    EXPECT_EQ(find_fault(layout, [](const SequenceShard& shard) { return tokens_of(shard); }), "")
        << name_of(layout);
  });
}

TEST(SequenceShard, PlacesEveryTokenOnceForAllPackedLayouts) {
  for_packed_layouts([](const SequenceLayout& layout) {
    EXPECT_EQ(find_fault(layout, [](const SequenceShard& shard) { return tokens_of(shard); }), "")
        << name_of(layout);
  });
}

// With batch > 1 the placement local + rank * T puts tokens of one sequence into another.
TEST(SequenceShard, TheCheckSeesTheNaivePlacement) {
  const Placement naive = [](const SequenceShard& shard) {
    Tokens tokens(static_cast<size_t>(shard.num_tokens()));
    std::iota(tokens.begin(), tokens.end(), shard.rank() * shard.num_tokens());
    return tokens;
  };
  const SequenceLayout one{.batch = 1, .length = 4, .num_ranks = 2};
  EXPECT_EQ(find_fault(one, naive), "");  // here it happens to be right
  SequenceLayout two = one;
  two.batch = 2;
  EXPECT_EQ(find_fault(two, naive), "token 2 is elsewhere");
  SequenceLayout zigzag = one;
  zigzag.cut = SequenceCut::kZigzag;
  EXPECT_NE(find_fault(zigzag, naive), "");
  SequenceLayout uneven = two;
  uneven.length = 5;
  EXPECT_NE(find_fault(uneven, naive), "");
}

TEST(SequenceShard, RunsAreLongestAndCoverTheTokensInOrder) {
  const auto check = [](const SequenceLayout& layout) {
    for (int rank = 0; rank < layout.num_ranks; ++rank) {
      const SequenceShard shard(layout, rank);
      Tokens tokens;
      const TokenRun* previous = nullptr;
      for (const TokenRun& run : shard.runs()) {
        EXPECT_EQ(run.local, std::ssize(tokens)) << name_of(layout);
        EXPECT_GT(run.count, 0) << name_of(layout);
        if (previous != nullptr) {
          EXPECT_GT(run.global, previous->global + previous->count) << name_of(layout);
        }
        for (int64_t i = 0; i < run.count; ++i) tokens.push_back(run.global + i);
        previous = &run;
      }
      EXPECT_EQ(tokens, expected_tokens(layout, rank)) << name_of(layout) << " rank " << rank;
    }
  };
  for_dense_layouts(check);
  for_packed_layouts(check);
}

TEST(SequenceShard, HasTheShapeOfItsTokens) {
  const SequenceShard batch_first({.batch = 2, .length = 5, .num_ranks = 2}, 1);
  EXPECT_EQ(batch_first.shape(), (Shape{2, 2}));
  EXPECT_EQ(batch_first.global_shape(), (Shape{2, 5}));
  const SequenceShard empty(
      {.batch = 3, .length = 5, .num_ranks = 4, .order = TokenOrder::kSequenceFirst}, 3);
  EXPECT_EQ(empty.shape(), (Shape{0, 3}));
  const SequenceShard packed({.num_ranks = 2, .packed = pack({4, 6}, 1, 3)}, 1);
  EXPECT_EQ(packed.shape(), (Shape{6}));  // 2 + 3, and the last of 3 padding tokens
  EXPECT_EQ(packed.global_shape(), (Shape{13}));
}

/// Rows [T, width] of random bytes.
std::vector<uint8_t> rows_of(int64_t num_bytes) {
  std::vector<uint8_t> rows(static_cast<size_t>(num_bytes));
  uint32_t state = 1;
  for (uint8_t& byte : rows) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return rows;
}

/// Shards, places and gathers rows of `width` values. Returns what is wrong, or "".
std::string move_fault(const SequenceLayout& layout, DType dtype, int64_t width) {
  const int64_t T = SequenceShard(layout, 0).num_global_tokens();
  const int64_t row_bytes = width * size_of(dtype);
  const std::vector<uint8_t> x = rows_of(T * row_bytes);
  const ConstTensorView global(x.data(), dtype, {T, width});
  std::vector<std::vector<uint8_t>> locals;
  std::vector<ConstTensorView> views;
  std::vector<uint8_t> placed(x.size(), 0xee);
  for (int rank = 0; rank < layout.num_ranks; ++rank) {
    const SequenceShard shard(layout, rank);
    const Tokens tokens = expected_tokens(layout, rank);
    locals.emplace_back(tokens.size() * static_cast<size_t>(row_bytes));
    const TensorView local(locals.back().data(), dtype, {std::ssize(tokens), width});
    shard_tokens(shard, global, local);
    std::vector<uint8_t> alone(x.size(), 0xee);
    std::vector<uint8_t> wanted_alone(x.size(), 0xee);
    std::vector<uint8_t> wanted;
    for (const int64_t token : tokens) {
      const auto row = x.begin() + token * row_bytes;
      wanted.insert(wanted.end(), row, row + row_bytes);
      std::copy(row, row + row_bytes, wanted_alone.begin() + token * row_bytes);
    }
    if (locals.back() != wanted) return "shard_tokens on rank " + std::to_string(rank);
    place_tokens(shard, local, TensorView(alone.data(), dtype, {T, width}));
    if (alone != wanted_alone) return "place_tokens on rank " + std::to_string(rank);
    views.emplace_back(local);
  }
  gather_shards(layout, views, TensorView(placed.data(), dtype, {T, width}));
  return placed == x ? "" : "gather_shards";
}

TEST(MoveTokens, GatherOfTheShardsIsTheGlobalTensorForAllLayouts) {
  const auto check = [](const SequenceLayout& layout) {
    EXPECT_EQ(move_fault(layout, DType::kF32, 3), "") << name_of(layout);
  };
  for_dense_layouts(check);
  for_packed_layouts(check);
}

TEST(MoveTokens, TakesAnyDtypeAndWidth) {
  for (int i = 0; i <= static_cast<int>(DType::kBool); ++i) {
    for (const int64_t width : {0, 1, 7, 64, 1000}) {
      for (const SequenceLayout& layout : list_dense_layouts(3, 11, 3)) {
        EXPECT_EQ(move_fault(layout, static_cast<DType>(i), width), "") << i << " " << width;
      }
    }
  }
}

TEST(MoveTokens, TakesTheDimensionsOfTheShardOrOneForAllTokens) {
  const SequenceShard shard({.batch = 2, .length = 3, .num_ranks = 2}, 0);
  const std::vector<int32_t> x = {0, 1, 2, 3, 4, 5};
  std::vector<int32_t> local(4);
  const std::vector<Shape> global_shapes = {{2, 3}, {6}, {6, 1}, {2, 3, 1}, {2, 3, 1, 1}};
  const std::vector<Shape> local_shapes = {{2, 2}, {4}, {4, 1}, {2, 2, 1}};
  for (const Shape& global_shape : global_shapes) {
    for (const Shape& local_shape : local_shapes) {
      local.assign(4, -1);
      shard_tokens(shard, {x.data(), global_shape}, {local.data(), local_shape});
      EXPECT_EQ(local, (std::vector<int32_t>{0, 1, 3, 4})) << global_shape.to_string();
    }
  }
}

// [0, 4] may be read as [L = 0, B = 4] or as rows of 4.
TEST(MoveTokens, AnEmptyShardMayBeFlatWhereItsWidthIsTheBatch) {
  const SequenceShard shard(
      {.batch = 4, .length = 5, .num_ranks = 4, .order = TokenOrder::kSequenceFirst}, 3);
  ASSERT_EQ(shard.num_tokens(), 0);
  std::vector<float> x(80, 1.0F);
  const ConstTensorView local(nullptr, DType::kF32, {0, 4});
  place_tokens(shard, local, {x.data(), {5, 4, 4}});
  place_tokens(shard, local, {x.data(), {20, 4}});
  place_tokens(shard, local, {x.data(), {5, 4}});
  EXPECT_EQ(x, std::vector<float>(80, 1.0F));
}

TEST(MoveTokens, RefusesTensorsThatDoNotFit) {
  const SequenceShard shard({.batch = 2, .length = 3, .num_ranks = 2}, 0);
  std::vector<float> x(12);
  std::vector<float> local(12);
  const auto shard_as = [&](const ConstTensorView& from, const TensorView& to) {
    return message_of([&] { shard_tokens(shard, from, to); }, ErrorCode::kInvalidArgument);
  };
  EXPECT_EQ(shard_as({x.data(), {6, 2}}, {local.data(), {5, 2}}),
            "local must have the dimensions [2, 2] or [4], followed by those of a row, got [5, 2] "
            "fp32");
  EXPECT_EQ(shard_as({x.data(), {7}}, {local.data(), {4}}),
            "global must have the dimensions [2, 3] or [6], followed by those of a row, got [7] "
            "fp32");
  EXPECT_EQ(shard_as({x.data(), {6, 2}}, {local.data(), {4, 1}}),
            "the tokens of local ([4, 1] fp32) and of global ([6, 2] fp32) must have the same "
            "dtype and width");
  EXPECT_EQ(shard_as({x.data(), DType::kI32, {6}}, {local.data(), {4}}),
            "the tokens of local ([4] fp32) and of global ([6] int32) must have the same dtype and "
            "width");
  EXPECT_EQ(shard_as({x.data(), {6}}, {x.data() + 2, {4}}),
            "local overlaps global; outputs must have memory of their own");
  EXPECT_EQ(shard_as({static_cast<float*>(nullptr), {6}}, {local.data(), {4}}),
            "global of shape [6] must have memory, got a null pointer");
  const std::vector<ConstTensorView> one = {{local.data(), {4}}};
  EXPECT_EQ(message_of([&] {
              gather_shards(shard.layout(), one, {x.data(), {6}});
            }),
            "locals must have one tensor per rank, 2, got 1");
}

TEST(MoveTokens, OnAGpuNeedOne) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  const SequenceShard shard({.length = 4, .num_ranks = 2}, 0);
  std::vector<float> memory(8);
  const Device gpu{DeviceKind::kCuda, 0};
  EXPECT_NE(message_of(
                [&] {
                  shard_tokens(shard, {memory.data(), {4}, gpu}, {memory.data() + 4, {2}, gpu});
                },
                ErrorCode::kUnsupported),
            "nothing was thrown");
}

// As many sequences as have an int32 number; counting them one by one would take seconds.
TEST(SequenceShard, OfWholeSequencesIsOneRun) {
  constexpr int64_t kBatch = std::numeric_limits<int32_t>::max();
  for (const SequenceCut cut : {SequenceCut::kContiguous, SequenceCut::kZigzag}) {
    const SequenceShard shard({.batch = kBatch, .length = 5, .cut = cut}, 0);
    EXPECT_EQ(shard.num_tokens(), 5 * kBatch);
    EXPECT_EQ(shard.shape(), (Shape{kBatch, 5}));
    ASSERT_EQ(shard.runs().size(), 1u);
    EXPECT_EQ(shard.runs()[0].count, 5 * kBatch);
    EXPECT_EQ(shard.global_index(5 * kBatch - 1), 5 * kBatch - 1);
  }
}

TEST(SequenceShard, RefusesLayoutsThatCannotBe) {
  const auto refusal = [](const SequenceLayout& layout, int rank) {
    return message_of([&] { SequenceShard(layout, rank); }, ErrorCode::kInvalidArgument);
  };
  EXPECT_EQ(refusal({.length = 4, .num_ranks = 0}, 0), "num_ranks must be at least 1, got 0");
  EXPECT_EQ(refusal({.length = 4, .num_ranks = 2}, 2), "rank must be in [0, 2), got 2");
  EXPECT_EQ(refusal({.batch = -1, .length = 4}, 0),
            "batch and length must not be negative, got -1 and 4");
  EXPECT_EQ(refusal({.batch = int64_t{1} << 40, .length = int64_t{1} << 40}, 0),
            "batch (1099511627776) times length (1099511627776) must be at most 2^60");
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(refusal({.batch = 0, .length = kHuge, .num_ranks = 2}, 0),
            "batch and length must be at most 2^60, got 0 and 9223372036854775807");
  EXPECT_EQ(refusal({.batch = kHuge, .length = 0}, 0),
            "batch and length must be at most 2^60, got 9223372036854775807 and 0");
  EXPECT_EQ(refusal({.batch = kHuge >> 32, .length = 4, .num_ranks = 2}, 1),
            "batch must be at most 16777216 for sequences that are cut among ranks, got "
            "2147483647; use TokenOrder::kSequenceFirst or shards of fewer sequences");
  EXPECT_EQ(refusal({.batch = 2, .packed = pack({3})}, 0),
            "batch and length must keep their defaults, 1 and 0, with packed sequences, got 2 and "
            "0");
  const SequenceShard shard({.length = 4, .num_ranks = 2}, 0);
  EXPECT_EQ(message_of([&] { static_cast<void>(shard.global_index(2)); }),
            "a local token of this shard must be in [0, 2), got 2");
  EXPECT_EQ(message_of([&] { static_cast<void>(shard.local_sequences()); }),
            "local_sequences is for packed sequences; this layout is [1, 4]");
}

}  // namespace
}  // namespace crossdock
