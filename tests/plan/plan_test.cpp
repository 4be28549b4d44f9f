#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/kept_routes.hpp"
#include "plan/plan_builder.hpp"

namespace crossdock {
namespace {

using Ids = std::vector<int32_t>;
using Counts = std::vector<int64_t>;

// The plans of all ranks, from their ids [P][T, K].
std::vector<PlanData> plan_all(const DispatchConfig& config, const std::vector<Ids>& ids) {
  check_config(config, static_cast<int>(ids.size()));
  const auto shared = std::make_shared<const DispatchConfig>(config);
  std::vector<Counts> packed;
  packed.reserve(ids.size());
  for (const Ids& rank_ids : ids) packed.push_back(pack_counts(read_kept_routes(config, rank_ids)));
  std::vector<PlanData> plans;
  for (size_t rank = 0; rank < ids.size(); ++rank) {
    plans.push_back(build_plan({.config = shared,
                                .P = static_cast<int>(ids.size()),
                                .rank = static_cast<int>(rank),
                                .id = 1,
                                .packed_counts = {packed.begin(), packed.end()}},
                               read_kept_routes(config, ids[rank])));
  }
  return plans;
}

// The arrival number of each row; -1 for pad rows.
Counts arrivals_by_row(const PlanData& plan) {
  Counts result(static_cast<size_t>(plan.num_rows()), -1);
  for (const RowBlock& block : plan.recv_blocks) {
    for (int64_t i = 0; i < block.count; ++i) {
      result[static_cast<size_t>(block.row + i)] = block.arrival + i;
    }
  }
  return result;
}

// First row and number of rows of each gap.
Counts gaps(const PlanData& plan) {
  Counts result;
  for (const RowRange& pad : pad_rows(plan)) {
    result.push_back(pad.first);
    result.push_back(pad.count);
  }
  return result;
}

TEST(Plan, SortsTheRoutesByExpertThenTokenThenSlot) {
  const auto plans =
      plan_all({.num_experts = 3, .top_k = 2, .width = 1}, {{0, 1, 1, 2, 0, 2, 1, 2}});
  Counts tokens;
  for (const int64_t route : plans[0].sent_routes) tokens.push_back(route / 2);
  EXPECT_EQ(tokens, (Counts{0, 2, 0, 1, 3, 1, 2, 3}));
  EXPECT_EQ(plans[0].local_counts, (Counts{2, 3, 3}));
  EXPECT_EQ(plans[0].local_starts, (Counts{0, 2, 5, 8}));
  EXPECT_EQ(plans[0].final_rows, plans[0].send_positions);
}

TEST(Plan, RegroupsArrivalsByExpertThenSource) {
  // Both experts on rank 1, with counts [2,3 | 1,4].
  const auto plans = plan_all({.num_experts = 2, .top_k = 1, .width = 1, .placement = {1, 1}},
                              {{0, 0, 1, 1, 1}, {0, 1, 1, 1, 1}});
  EXPECT_EQ(arrivals_by_row(plans[1]), (Counts{0, 1, 5, 2, 3, 4, 6, 7, 8, 9}));
  EXPECT_EQ(plans[1].local_counts, (Counts{3, 7}));
  EXPECT_EQ(plans[0].num_local_experts(), 0);
  EXPECT_EQ(plans[0].num_rows(), 0);
  EXPECT_EQ(plans[0].local_starts, (Counts{0}));
}

TEST(Plan, RegroupsFourSourcesWithOneRowPerChunk) {
  const auto plans = plan_all({.num_experts = 2, .top_k = 1, .width = 1, .placement = {0, 0}},
                              {{0, 1}, {0, 1}, {0, 1}, {0, 1}});
  EXPECT_EQ(arrivals_by_row(plans[0]), (Counts{0, 2, 4, 6, 1, 3, 5, 7}));
}

TEST(Plan, AlignedSegmentsOfEmptyExpertsTakeNoSpace) {
  const auto plans = plan_all({.num_experts = 4, .top_k = 1, .width = 1, .alignment = 32},
                              {{1, 1, 1, 1, 1, 3, 3, 3}});
  EXPECT_EQ(plans[0].local_starts, (Counts{0, 0, 32, 32, 64}));
  EXPECT_EQ(plans[0].local_counts, (Counts{0, 5, 0, 3}));
  EXPECT_EQ(plans[0].num_rows(), 64);
  EXPECT_EQ(gaps(plans[0]), (Counts{5, 27, 35, 29}));
}

TEST(Plan, ExpertsAreAsEvenAsCanBeAndSomeRanksMayHaveNone) {
  Counts firsts;
  for (int rank = 0; rank <= 4; ++rank) firsts.push_back(first_expert(10, 4, rank));
  EXPECT_EQ(firsts, (Counts{0, 3, 6, 8, 10}));
  EXPECT_EQ(first_expert(2, 4, 2), 2);
  const auto plans =
      plan_all({.num_experts = 2, .top_k = 2, .width = 1}, {{0, 1}, {}, {1, -1}, {-1, -1}});
  EXPECT_EQ(plans[0].rows_per_rank, (Counts{1, 2, 0, 0}));
  EXPECT_EQ(plans[2].final_rows, (Counts{1, -1}));
  EXPECT_EQ(plans[3].num_sent(), 0);
  EXPECT_EQ(plans[1].tokens_per_rank, (Counts{1, 0, 1, 1}));
}

TEST(Plan, FinalRowsFollowAnExplicitPlacement) {
  // Rank 1 owns experts 0 and 2, rank 0 owns 1.
  const auto plans =
      plan_all({.num_experts = 3, .top_k = 2, .width = 1, .alignment = 8, .placement = {1, 0, 1}},
               {{2, 0, 1, 0}, {0, 2}});
  EXPECT_EQ(plans[0].final_rows, (Counts{8, 0, 0, 1}));
  EXPECT_EQ(plans[1].final_rows, (Counts{2, 9}));
  EXPECT_EQ(plans[1].local_starts, (Counts{0, 8, 16}));
  EXPECT_EQ(plans[0].send_offsets, (Counts{0, 1, 4}));
  EXPECT_EQ(plans[0].send_positions, (Counts{3, 1, 0, 2}));
}

TEST(Plan, PadToCapacityGivesEverySourceTheSameRoom) {
  // C = ceil(4 / 2 * 1.5) = 3.
  const auto plans =
      plan_all({.num_experts = 2,
                .top_k = 1,
                .width = 1,
                .capacity = Capacity{.factor = 1.5, .pad_to_capacity = true, .max_tokens = 4}},
               {{0, 0, 0, 0}, {0, 1}});
  EXPECT_EQ(plans[0].local_starts, (Counts{0, 6}));
  EXPECT_EQ(plans[0].local_counts, (Counts{6}));
  EXPECT_EQ(plans[0].dropped, (Counts{1, 0}));
  EXPECT_EQ(plans[0].final_rows, (Counts{0, 1, 2, -1}));
  EXPECT_EQ(plans[1].final_rows, (Counts{3, 3}));
  EXPECT_EQ(plans[1].rows_per_rank, (Counts{6, 6}));
  EXPECT_EQ(gaps(plans[0]), (Counts{4, 2}));
  EXPECT_EQ(gaps(plans[1]), (Counts{0, 3, 4, 2}));
}

TEST(Plan, TooManyRowsNameTheRankAndTheSizeNeeded) {
  const auto plans =
      plan_all({.num_experts = 2, .top_k = 1, .width = 1, .max_rows = 3}, {{1, 1}, {1, 1, 0}});
  for (const PlanData& plan : plans) {
    try {
      check_max_rows(plan);
      FAIL() << "must throw";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCapacity);
      EXPECT_STREQ(error.what(),
                   "rank 1 would receive 4 rows, more than max_rows (3); max_rows must be at "
                   "least 4");
    }
  }
}

template <typename AnyPlan>
concept ShowsMemory = requires(AnyPlan&& plan) {
  std::forward<AnyPlan>(plan).segments();
}
|| requires(AnyPlan&& plan) {
  std::forward<AnyPlan>(plan).weights();
}
|| requires(AnyPlan&& plan) {
  std::forward<AnyPlan>(plan).dropped();
};

TEST(Plan, ShowsNoMemoryOfATemporary) {
  static_assert(ShowsMemory<const Plan&> && !ShowsMemory<Plan> && !ShowsMemory<const Plan>);
}

TEST(Plan, RowsWhoseBytesCannotBeCountedAreRefused) {
  PlanData plan;
  plan.config = std::make_shared<const DispatchConfig>(
      DispatchConfig{.num_experts = 4, .top_k = 2, .width = 1 << 30});
  plan.K = 2;
  plan.rows_per_rank = {1 << 20, 1 << 20};
  plan.tokens_per_rank = {1 << 19, 1 << 19};
  EXPECT_NO_THROW(check_max_rows(plan));
  plan.rows_per_rank[1] = int64_t{1} << 32;
  EXPECT_THROW(check_max_rows(plan), Error);
}

}  // namespace
}  // namespace crossdock
