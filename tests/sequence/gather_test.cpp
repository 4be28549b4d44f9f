// Tokens of all ranks, gathered over a group.
#include <gtest/gtest.h>

#include "crossdock/threads.hpp"
#include "sequence/layouts.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

std::vector<float> numbered(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

std::vector<float> local_rows(const SequenceShard& shard, int64_t width) {
  const std::vector<float> x = numbered(shard.num_global_tokens() * width);
  std::vector<float> rows;
  for (const int64_t token : expected_tokens(shard.layout(), shard.rank())) {
    rows.insert(rows.end(), x.begin() + token * width, x.begin() + (token + 1) * width);
  }
  return rows;
}

void expect_gathered(const TensorView& got, const Shape& shape) {
  EXPECT_EQ(got.shape, shape);
  const auto values = got.as<float>();
  EXPECT_EQ(std::vector<float>(values.begin(), values.end()), numbered(shape.num_elements()));
}

TEST(GatherTokens, GivesEveryRankTheGlobalTensor) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [&](Group& group) {
      for (const int64_t length : {0, 1, 5, 12}) {
        for (const SequenceLayout& layout : list_dense_layouts(3, length, ranks)) {
          const SequenceShard shard(layout, group.rank());
          const std::vector<float> rows = local_rows(shard, 3);  // as wide as the batch
          const Shape dims = shard.shape();
          const Shape global = shard.global_shape();
          const OwnedTensor full =
              gather_tokens(group, shard, {rows.data(), {dims[0], dims[1], 3}});
          expect_gathered(full.view, {global[0], global[1], 3});
          const OwnedTensor flat =
              gather_tokens(group, shard, {rows.data(), {shard.num_tokens(), 3}});
          if (length > 0) expect_gathered(flat.view, {3 * length, 3});
        }
      }
    });
  }
}

TEST(GatherTokens, TakesPackedSequencesAndGivenMemory) {
  run_ranks(4, [](Group& group) {
    const SequenceLayout layout{
        .num_ranks = 4, .cut = SequenceCut::kZigzag, .packed = pack({9, 0, 3, 1}, 2, 3)};
    const SequenceShard shard(layout, group.rank());
    const int64_t T = shard.num_global_tokens();
    const std::vector<float> rows = local_rows(shard, 2);
    std::vector<float> global(static_cast<size_t>(2 * T));
    const OwnedTensor given = gather_tokens(group, shard, {rows.data(), {shard.num_tokens(), 2}},
                                            {global.data(), {T, 2}});
    EXPECT_EQ(given.view.data, global.data());
    expect_gathered(given.view, {T, 2});

    // One value per token.
    const TokenDescription own = describe_tokens(shard);
    const OwnedTensor mask = gather_tokens(group, shard, own.mask.view);
    SequenceLayout one_rank = layout;
    one_rank.num_ranks = 1;
    const TokenDescription all = describe_tokens(SequenceShard(one_rank, 0));
    const auto got = mask.view.as<bool>();
    const auto wanted = all.mask.view.as<bool>();
    EXPECT_TRUE(std::equal(got.begin(), got.end(), wanted.begin(), wanted.end()));
  });
}

TEST(GatherTokens, AnInvalidCallIsTheSameErrorOnEveryRank) {
  run_ranks(3, [](Group& group) {
    const SequenceLayout layout{.batch = 2, .length = 7, .num_ranks = 3};
    const bool is_odd_one = group.rank() == 1;
    const auto gather = [&](const SequenceLayout& used, int rank, int64_t width) {
      return message_of([&] {
        const SequenceShard shard(used, rank);
        const std::vector<float> rows(static_cast<size_t>(shard.num_tokens() * width));
        static_cast<void>(gather_tokens(group, shard, {rows.data(), {shard.num_tokens(), width}}));
      });
    };
    SequenceLayout other = layout;
    other.cut = SequenceCut::kZigzag;
    const std::string different = gather(is_odd_one ? other : layout, group.rank(), 2);
    EXPECT_NE(different.find("zigzag"), std::string::npos) << different;
    EXPECT_NE(different.find("contiguous"), std::string::npos) << different;

    const std::string wrong_rank = gather(layout, is_odd_one ? 2 : group.rank(), 2);
    EXPECT_NE(wrong_rank.find("the shard must be that of rank 1 of 3, as in the group, got rank 2 "
                              "of 3"),
              std::string::npos)
        << wrong_rank;

    EXPECT_EQ(gather(layout, group.rank(), is_odd_one ? 5 : 2),
              "gather_tokens: local must have the same number of dimensions and row size on all "
              "ranks; rank 1 has rows of 20 bytes, the ranks before it have rows of 8");
    EXPECT_EQ(gather(layout, group.rank(), 2), "nothing was thrown");  // the group is usable
  });
}

TEST(GatherTokens, RefusesDeviceMemory) {
  run_ranks(1, [](Group& group) {
    const SequenceShard shard({.length = 2}, 0);
    const ConstTensorView local(&group, DType::kF32, {2}, {DeviceKind::kCuda, 0});
    EXPECT_NE(message_of([&] {
                static_cast<void>(gather_tokens(group, shard, local));
              }).find("local must be in host memory"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace crossdock
