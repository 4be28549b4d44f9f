#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cost/step_sizes.hpp"
#include "cost/top_k_odds.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/planner.hpp"
#include "dispatch/payload.hpp"
#include "dispatch/random_case.hpp"
#include "plan/placement.hpp"

namespace crossdock {
namespace {

constexpr int64_t kWidth = 3;
// Bytes that every rank sends, on thread ranks.
std::vector<Sent> run_payload(const Routes& routes, int ranks_per_node, const std::string& strategy,
                              int64_t num_chunks = 1) {
  std::vector<Sent> sent(routes.ids.size());
  ThreadOptions options = short_deadlines();
  options.ranks_per_node = ranks_per_node;
  options.group.staging_bytes = 4096;  // several rounds
  run_ranks(
      routes.num_ranks(),
      [&](Group& group) {
        sent[static_cast<size_t>(group.rank())] = send_payload(group, routes, strategy, num_chunks);
      },
      options);
  return sent;
}

// A rank's bytes on the links, by a strategy's model.
struct Flow {
  LinkFlow rows;
  double row_bytes = 0;
  bool reaches_peers = false;

  Flow(const Routes& routes, const StrategyModel& model, Movement movement)
      : rows(model.flow(movement, count(routes), routes.topology)),
        row_bytes(row_bytes_of({.config = routes.config, .dtype = routes.dtype}).of(movement)),
        reaches_peers(model.reaches_peers()) {}
};

void expect_traffic(const Traffic& traffic, const Flow& flow, size_t rank) {
  EXPECT_EQ(static_cast<double>(traffic.bytes_between_nodes),
            flow.rows.sent_between[rank] * flow.row_bytes);
  // Rows stored into a peer's memory do not pass through the communicator.
  EXPECT_EQ(static_cast<double>(traffic.bytes_within_node),
            flow.reaches_peers ? 0.0 : flow.rows.sent_within[rank] * flow.row_bytes);
}

struct TopologyCase {
  int num_ranks;
  int ranks_per_node;
};

class StrategyTraffic : public testing::TestWithParam<TopologyCase> {};

Routes routes_on(const TopologyCase& topology, PartialSums partial_sums) {
  return random_routes({.num_experts = 13,
                        .top_k = 5,
                        .width = kWidth,
                        .alignment = 8,
                        .capacity = {},
                        .placement = {},
                        .partial_sums = partial_sums},
                       Topology::uniform(topology.num_ranks, topology.ranks_per_node), 90,
                       /*holes=*/true);
}

TEST_P(StrategyTraffic, IsToTheByteWhatTheModelCountsFromTheRoutes) {
  struct Rows {
    DType dtype;
    PartialSums sums;
  };
  for (const auto& [dtype, sums] :
       {Rows{DType::kF32, PartialSums::kNone}, Rows{DType::kF32, PartialSums::kF32},
        Rows{DType::kBF16, PartialSums::kF32}, Rows{DType::kBF16, PartialSums::kRowType},
        Rows{DType::kF16, PartialSums::kRowType}}) {
    Routes routes = routes_on(GetParam(), sums);
    routes.dtype = dtype;
    const Movement back = sums == PartialSums::kNone ? Movement::kCombine : Movement::kPartialSums;
    for (const auto& strategy : built_in_strategies()) {
      const std::string name(strategy->name());
      const std::vector<Sent> sent = run_payload(routes, GetParam().ranks_per_node, name);
      const Flow out_flow(routes, strategy->model(), Movement::kDispatch);
      const Flow back_flow(routes, strategy->model(), back);
      for (size_t rank = 0; rank < sent.size(); ++rank) {
        SCOPED_TRACE(name + ", " + std::string(name_of(dtype)) + ", partial sums " +
                     std::string(name_of(sums)) + ", rank " + std::to_string(rank));
        expect_traffic(sent[rank].dispatch, out_flow, rank);
        expect_traffic(sent[rank].combine, back_flow, rank);
      }
    }
  }
}

TEST_P(StrategyTraffic, IsTheSameInChunks) {
  const Routes routes = routes_on(GetParam(), PartialSums::kNone);
  for (const auto& strategy : built_in_strategies()) {
    const std::string name(strategy->name());
    const Flow out(routes, strategy->model(), Movement::kDispatch);
    for (const int64_t num_chunks : {2, 5}) {
      const std::vector<Sent> sent =
          run_payload(routes, GetParam().ranks_per_node, name, num_chunks);
      for (size_t rank = 0; rank < sent.size(); ++rank) {
        SCOPED_TRACE(name + ", rank " + std::to_string(rank));
        expect_traffic(sent[rank].dispatch, out, rank);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Topologies, StrategyTraffic,
                         testing::Values(TopologyCase{1, 1}, TopologyCase{4, 4}, TopologyCase{4, 2},
                                         TopologyCase{5, 1}, TopologyCase{7, 3}, TopologyCase{8, 5},
                                         TopologyCase{16, 4}),
                         [](const testing::TestParamInfo<TopologyCase>& info) {
                           return std::to_string(info.param.num_ranks) + "_by_" +
                                  std::to_string(info.param.ranks_per_node);
                         });

// Each count is a sum over independent tokens, each of which adds between 0 and `most` rows, so its
// variance is at most `most` times its mean.
void expect_sampled(const std::vector<double>& counted, const std::vector<double>& expected,
                    double most) {
  ASSERT_EQ(counted.size(), expected.size());
  for (size_t i = 0; i < counted.size(); ++i) {
    EXPECT_NEAR(counted[i], expected[i], 5.0 * std::sqrt(most * expected[i])) << i;
  }
}

TEST(ExpectedSums, AreWhatRandomRoutesComeToWithinSamplingError) {
  for (const auto& [num_ranks, ranks_per_node] :
       {TopologyCase{8, 4}, TopologyCase{7, 3}, TopologyCase{6, 1}}) {
    DispatchConfig config{.num_experts = 21, .top_k = 4, .width = kWidth};
    if (num_ranks == 7) {
      for (int32_t e = 0; e < 21; ++e) config.placement.push_back(e < 10 ? 5 : e % 4);
    }
    constexpr int64_t kTokens = 20000;
    const Routes routes =
        random_routes(config, Topology::uniform(num_ranks, ranks_per_node), kTokens, false);
    const RouteSums counted = count(routes);
    const Placement placement = make_placement(config, num_ranks);
    const RouteSums expected =
        expected_sums(expected_spread(placement, routes.topology, {.top_k = 4, .zipf = 0}),
                      routes.topology, kTokens);
    for (const LinkFlow RouteSums::*flow :
         {&RouteSums::routes, &RouteSums::ranks, &RouteSums::nodes}) {
      expect_sampled((counted.*flow).kept, (expected.*flow).kept, 4);
      expect_sampled((counted.*flow).sent_within, (expected.*flow).sent_within, 4);
      expect_sampled((counted.*flow).sent_between, (expected.*flow).sent_between, 4);
      expect_sampled((counted.*flow).received_within, (expected.*flow).received_within, 4);
      expect_sampled((counted.*flow).received_between, (expected.*flow).received_between, 4);
    }
    expect_sampled(counted.reach_own_node, expected.reach_own_node, 1);
  }
}

}  // namespace
}  // namespace crossdock
