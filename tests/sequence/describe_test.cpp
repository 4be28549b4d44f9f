#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sequence/layouts.hpp"

namespace crossdock {
namespace {

using testing::Each;
using testing::ElementsAre;

TEST(DescribeTokens, PaddingIsBetweenAndAfterSequences) {
  const SequenceShard all({.packed = pack({3, 0, 2}, 4, 2)}, 0);
  const TokenDescription tokens = describe_tokens(all);
  EXPECT_THAT(tokens.sequence_ids.view.as<int32_t>(), ElementsAre(0, 0, 0, 0, 2, 2, 2, 2, 2, 2));
  EXPECT_THAT(tokens.positions.view.as<int64_t>(), ElementsAre(0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
  EXPECT_THAT(tokens.mask.view.as<bool>(),
              ElementsAre(false, false, false, true, false, false, true, true, true, true));
  EXPECT_EQ(tokens.num_sequences, 3);
}

TEST(DescribeTokens, OfABatchHaveTheirSequenceAndPosition) {
  const SequenceLayout layout{.batch = 2, .length = 3, .order = TokenOrder::kSequenceFirst};
  const TokenDescription tokens = describe_tokens(SequenceShard(layout, 0));
  EXPECT_THAT(tokens.sequence_ids.view.as<int32_t>(), ElementsAre(0, 1, 0, 1, 0, 1));
  EXPECT_THAT(tokens.positions.view.as<int64_t>(), ElementsAre(0, 0, 1, 1, 2, 2));
  EXPECT_THAT(tokens.mask.view.as<bool>(), Each(false));
  EXPECT_EQ(tokens.num_sequences, 2);
}

// The router needs at least one sequence and valid numbers, even if there is only padding.
TEST(DescribeTokens, WithoutSequencesAreValidToo) {
  const TokenDescription tokens = describe_tokens(SequenceShard({.packed = pack({}, 1, 3)}, 0));
  EXPECT_EQ(tokens.num_sequences, 1);
  EXPECT_THAT(tokens.sequence_ids.view.as<int32_t>(), ElementsAre(0, 0, 0));
  EXPECT_THAT(tokens.mask.view.as<bool>(), Each(true));
  const TokenDescription none = describe_tokens(SequenceShard({.batch = 0, .length = 5}, 0));
  EXPECT_EQ(none.num_sequences, 1);
  EXPECT_EQ(none.mask.view.num_rows(), 0);
}

template <typename T>
void expect_shard_of(const SequenceShard& shard, const OwnedTensor& all, const OwnedTensor& own) {
  const auto global = all.view.as<T>();
  const auto local = own.view.as<T>();
  std::vector<T> wanted;
  for (const int64_t token : expected_tokens(shard.layout(), shard.rank())) {
    wanted.push_back(global[static_cast<size_t>(token)]);
  }
  EXPECT_TRUE(std::equal(local.begin(), local.end(), wanted.begin(), wanted.end()))
      << name_of(shard.layout()) << " rank " << shard.rank();
}

TEST(DescribeTokens, OfAShardAreTheShardOfAll) {
  const auto check = [](const SequenceLayout& layout) {
    SequenceLayout one_rank = layout;
    one_rank.num_ranks = 1;
    const TokenDescription all = describe_tokens(SequenceShard(one_rank, 0));
    for (int rank = 0; rank < layout.num_ranks; ++rank) {
      const SequenceShard shard(layout, rank);
      const TokenDescription own = describe_tokens(shard);
      expect_shard_of<int32_t>(shard, all.sequence_ids, own.sequence_ids);
      expect_shard_of<int64_t>(shard, all.positions, own.positions);
      expect_shard_of<bool>(shard, all.mask, own.mask);
      EXPECT_EQ(own.num_sequences, all.num_sequences);
    }
  };
  for_packed_layouts(check);
  for (const int64_t length : {0, 5, 17}) {
    for (const SequenceLayout& layout : list_dense_layouts(3, length, 4)) check(layout);
  }
}

}  // namespace
}  // namespace crossdock
