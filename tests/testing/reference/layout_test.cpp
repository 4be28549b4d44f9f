#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

using testing::Each;
using testing::ElementsAre;

RankInput rank_with(int64_t num_tokens, std::vector<int64_t> ids,
                    std::vector<double> weights = {}) {
  RankInput input;
  input.T = num_tokens;
  if (weights.empty()) weights.assign(ids.size(), 1.0);
  input.expert_ids = std::move(ids);
  input.weights = std::move(weights);
  return input;
}

std::vector<int64_t> tokens_of(const Receiver& receiver) {
  std::vector<int64_t> tokens;
  for (const RowSource& source : receiver.sources) tokens.push_back(source.token);
  return tokens;
}

std::vector<int> ranks_of(const Receiver& receiver) {
  std::vector<int> ranks;
  for (const RowSource& source : receiver.sources) ranks.push_back(source.rank);
  return ranks;
}

const std::vector<int64_t> kWorkedIds = {0, 1, 1, 2, 0, 2, 1, 2};

TEST(ReferenceLayout, SortsTheWorkedVectorByExpertThenToken) {
  const Layout layout = lay_out({.num_experts = 3, .top_k = 2}, {rank_with(4, kWorkedIds)});
  EXPECT_THAT(tokens_of(layout.receivers[0]), ElementsAre(0, 2, 0, 1, 3, 1, 2, 3));
  EXPECT_THAT(layout.receivers[0].rows_per_expert, ElementsAre(2, 3, 3));
  EXPECT_THAT(layout.receivers[0].segment_starts, ElementsAre(0, 2, 5, 8));
}

TEST(ReferenceLayout, PutsSourceRanksInOrderWithinAnExpert) {
  const RankInput one = rank_with(2, {1, 0});
  const Layout layout = lay_out({.num_experts = 2, .top_k = 1}, {one, one, one});
  EXPECT_THAT(ranks_of(layout.receivers[0]), ElementsAre(0, 1, 2));
  EXPECT_THAT(tokens_of(layout.receivers[0]), ElementsAre(1, 1, 1));
  EXPECT_THAT(tokens_of(layout.receivers[1]), ElementsAre(0, 0, 0));
  EXPECT_TRUE(layout.receivers[2].experts.empty());
  EXPECT_THAT(layout.receivers[2].segment_starts, ElementsAre(0));
}

TEST(ReferenceLayout, RegroupsTheWorkedCountsByExpertThenSource) {
  // Arrival order [source][expert] with counts [2, 3 | 1, 4] is rows 0..9.
  const Layout layout = lay_out({.num_experts = 2, .top_k = 1},
                                {rank_with(5, {0, 0, 1, 1, 1}), rank_with(5, {0, 1, 1, 1, 1})});
  EXPECT_THAT(layout.receivers[0].rows_per_expert, ElementsAre(3));
  EXPECT_THAT(layout.receivers[1].rows_per_expert, ElementsAre(7));
  EXPECT_THAT(ranks_of(layout.receivers[0]), ElementsAre(0, 0, 1));
  EXPECT_THAT(ranks_of(layout.receivers[1]), ElementsAre(0, 0, 0, 1, 1, 1, 1));
}

TEST(ReferenceLayout, AlignsSegmentsAndGivesEmptyExpertsNoSpace) {
  const Layout layout = lay_out({.num_experts = 4, .top_k = 1, .alignment = 32},
                                {rank_with(8, {1, 3, 1, 3, 1, 3, 1, 1})});
  EXPECT_THAT(layout.receivers[0].rows_per_expert, ElementsAre(0, 5, 0, 3));
  EXPECT_THAT(layout.receivers[0].segment_starts, ElementsAre(0, 0, 32, 32, 64));
  EXPECT_EQ(layout.receivers[0].sources[5], RowSource{});
}

TEST(ReferenceLayout, SpreadsExpertsAsEvenlyAsCanBe) {
  EXPECT_THAT(owners_of({.num_experts = 5}, 3), ElementsAre(0, 0, 1, 1, 2));
  EXPECT_THAT(owners_of({.num_experts = 2}, 4), ElementsAre(0, 1));
  EXPECT_THAT(owners_of({.num_experts = 3, .placement = {2, 0, 2}}, 3), ElementsAre(2, 0, 2));
}

TEST(ReferenceLayout, ComputesTheWorkedCapacities) {
  EXPECT_EQ(capacity_of(16, 2, 8, 0.5), 2);
  EXPECT_EQ(capacity_of(16, 2, 8, 0.6), 3);
  EXPECT_EQ(capacity_of(200, 2, 8, 1.1), 56);
}

TEST(ReferenceLayout, PositionKeepsTheLowestTokens) {
  const Layout layout = lay_out({.num_experts = 2, .top_k = 1, .capacity = Capacity{.factor = 0.8}},
                                {rank_with(5, {0, 0, 0, 0, 1}, {.1, .2, .3, .4, .5})});
  EXPECT_THAT(tokens_of(layout.receivers[0]), ElementsAre(0, 1, 4));
  EXPECT_THAT(layout.dropped[0], ElementsAre(2, 0));
  EXPECT_FALSE(layout.places[0][2].is_kept());
}

TEST(ReferenceLayout, WeightKeepsTheLargestInTokenOrderAndTiesToTheLowerToken) {
  const Capacity capacity{.factor = 0.8, .policy = DropPolicy::kWeight};
  const Layout layout = lay_out({.num_experts = 2, .top_k = 1, .capacity = capacity},
                                {rank_with(5, {0, 0, 0, 0, 1}, {.3, .4, .4, .4, .5})});
  EXPECT_THAT(tokens_of(layout.receivers[0]), ElementsAre(1, 2, 4));
}

TEST(ReferenceLayout, PadToCapacityGivesEverySourceItsRows) {
  const Capacity capacity{.factor = 1.0, .pad_to_capacity = true, .max_tokens = 4};
  const Layout layout = lay_out({.num_experts = 2, .top_k = 1, .capacity = capacity},
                                {rank_with(1, {0}), rank_with(2, {0, 0})});
  EXPECT_THAT(ranks_of(layout.receivers[0]), ElementsAre(0, -1, 1, 1));
  EXPECT_THAT(ranks_of(layout.receivers[1]), ElementsAre(-1, -1, -1, -1));
  EXPECT_THAT(layout.receivers[0].rows_per_expert, ElementsAre(3));
}

TEST(ReferenceLayout, MaskedTokensAndAbsentRoutesGoNowhereButCountInTheCapacity) {
  RankInput input = rank_with(4, {0, -1, 0, 0}, {1, 0, 1, 1});
  input.mask = {1, 0, 0, 0};
  const Layout layout =
      lay_out({.num_experts = 2, .top_k = 1, .capacity = Capacity{.factor = 1.0}}, {input});
  EXPECT_THAT(tokens_of(layout.receivers[0]), ElementsAre(2, 3));
  EXPECT_THAT(layout.dropped[0], Each(0));
}

TEST(ReferenceLayout, RefusesPlacementsThatCannotBe) {
  const auto lay_out_on_2_ranks = [](const std::vector<int32_t>& placement) {
    lay_out({.num_experts = 2, .top_k = 1, .placement = placement},
            {rank_with(1, {0}), rank_with(1, {1})});
  };
  for (const std::vector<int32_t>& wrong :
       {std::vector<int32_t>{0, 2}, {65536, 0}, {-1, 0}, {0}, {0, 1, 0}}) {
    EXPECT_THROW(lay_out_on_2_ranks(wrong), Error);
  }
  EXPECT_NO_THROW(lay_out_on_2_ranks({1, 1}));
}

TEST(ReferenceCombine, SumsInSlotOrderInSinglePrecision) {
  const Layout layout = lay_out({.num_experts = 3, .top_k = 3}, {rank_with(2, {0, 1, 2, 2, 0, 1})});
  // Rows by expert: (0, 1), (0, 1), (0, 1); the products of token 0 are 1e8, 1, -1e8.
  const PerRank rows = {{1e8, 1.0, 1.0, -1e8, -1e8, 1e8}};
  EXPECT_THAT(combine_exact(layout, 1, DType::kF32, rows)[0], ElementsAre(0.0, 0.0));
  EXPECT_THAT(combine(layout, 1, rows)[0], ElementsAre(1.0, 1.0));
  const PerRank reordered = {{1e8, 1e8, -1e8, -1e8, 1.0, 1.0}};
  EXPECT_EQ(combine_exact(layout, 1, DType::kF32, reordered)[0][0], 1.0);
}

TEST(ReferenceCombine, RoundsOnceToTheDtype) {
  const Layout layout = lay_out({.num_experts = 2, .top_k = 2}, {rank_with(1, {0, 1})});
  // In bf16, 256 + 1 loses the 1 each time; in fp32 the sum is 258, which is a bf16 value.
  const PerRank weights = {{1.0, 2.0}};
  EXPECT_EQ(combine_exact(layout, 1, DType::kBF16, {{256.0, 1.0}}, &weights)[0][0], 258.0);
  EXPECT_EQ(combine_exact(layout, 1, DType::kBF16, {{256.0, 0.5}}, &weights)[0][0], 256.0);
}

}  // namespace
}  // namespace crossdock::reference
