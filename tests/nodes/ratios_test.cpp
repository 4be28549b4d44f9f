// 2 nodes x 4 ranks, K8 E64, fp32: bytes between the nodes as planned, as counted from the routes,
// and as actually sent.

#include <gtest/gtest.h>

#include <cmath>

#include "crossdock/planner.hpp"
#include "dispatch/payload.hpp"
#include "nodes/node_runner.hpp"
#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::nodes {
namespace {

constexpr int64_t kTokens = 500;
constexpr int64_t kWidth = 3;
constexpr double kRowBytes = kWidth * 4;
constexpr Shape kTwoNodes{.size = 8, .ranks_per_node = 4};

// Bytes between nodes, of all ranks.
struct Crossing {
  double dispatch = 0;
  double combine = 0;
  double partial_sums = 0;
};

DispatchConfig config_of(PartialSums partial_sums) {
  return {.num_experts = 64, .top_k = 8, .width = kWidth, .partial_sums = partial_sums};
}

Crossing planned(const std::string& strategy) {
  const CostEstimate costs = estimate_costs({.config = config_of(PartialSums::kNone),
                                             .topology = Topology::uniform(8, 4),
                                             .tokens = kTokens,
                                             .dtype = DType::kF32});
  for (const StrategyCost& cost : costs.strategies) {
    if (cost.name != strategy) continue;
    return {8 * cost.dispatch.bytes.between_nodes, 8 * cost.combine.bytes.between_nodes,
            8 * cost.partial_sums.bytes.between_nodes};
  }
  return {};
}

double total(const std::vector<double>& rows) {
  return std::accumulate(rows.begin(), rows.end(), 0.0) * kRowBytes;
}

Crossing counted(const Routes& routes, const StrategyModel& model) {
  const RouteSums sums = count(routes);
  const auto crossing = [&](Movement movement) {
    return total(model.flow(movement, sums, routes.topology).sent_between);
  };
  return {crossing(Movement::kDispatch), crossing(Movement::kCombine),
          crossing(Movement::kPartialSums)};
}

// Bytes that all ranks have sent between nodes; `own` is this rank's share.
double of_all_ranks(Group& group, int64_t own) {
  const Agreement all =
      group.agree({.operation = "sum", .body = std::as_bytes(std::span(&own, 1))});
  double sum = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    int64_t one = 0;
    std::copy_n(all.body(rank).begin(), sizeof one, reinterpret_cast<std::byte*>(&one));
    sum += static_cast<double>(one);
  }
  return sum;
}

Crossing sent(Group& group, const Routes& routes, const std::string& strategy) {
  Crossing crossing;
  for (const PartialSums partial_sums : {PartialSums::kNone, PartialSums::kF32}) {
    Routes same = routes;
    same.config = config_of(partial_sums);
    const Sent own = send_payload(group, same, strategy);
    crossing.dispatch = of_all_ranks(group, own.dispatch.bytes_between_nodes);
    (partial_sums == PartialSums::kNone ? crossing.combine : crossing.partial_sums) =
        of_all_ranks(group, own.combine.bytes_between_nodes);
  }
  return crossing;
}

void expect_ratios(const Crossing& alltoall, const Crossing& hierarchical) {
  EXPECT_LE(hierarchical.dispatch, 0.26 * alltoall.dispatch);
  EXPECT_LE(hierarchical.partial_sums, 0.26 * alltoall.combine);
  EXPECT_LE(hierarchical.partial_sums, 0.38 * alltoall.partial_sums);
  EXPECT_DOUBLE_EQ(hierarchical.combine, alltoall.combine);
}

// A token adds between 0 and 8 rows, so the variance of a sum is at most 8 times its mean.
void expect_sampled(double got, double expected) {
  EXPECT_NEAR(got / kRowBytes, expected / kRowBytes, 5 * std::sqrt(8 * expected / kRowBytes));
}

TEST(Ratios, BetweenTwoNodesAreAsPlannedAsCountedAndAsSent) {
  run_on(
      kTwoNodes,
      [](Group& group) {
        const Routes routes = random_routes(config_of(PartialSums::kNone), group.topology(),
                                            kTokens, /*holes=*/false);
        std::vector<Crossing> as_sent;
        for (const std::string& name : strategy_names()) {
          SCOPED_TRACE(name);
          const Crossing plan = planned(name);
          const Crossing count = counted(routes, make_strategy(name)->model());
          as_sent.push_back(sent(group, routes, name));
          EXPECT_EQ(as_sent.back().dispatch, count.dispatch);
          EXPECT_EQ(as_sent.back().combine, count.combine);
          EXPECT_EQ(as_sent.back().partial_sums, count.partial_sums);
          expect_sampled(count.dispatch, plan.dispatch);
          expect_sampled(count.combine, plan.combine);
          expect_sampled(count.partial_sums, plan.partial_sums);
        }
        expect_ratios(planned("alltoall"), planned("hierarchical"));
        expect_ratios(as_sent[1], as_sent[3]);
      },
      conformance::test_deadlines());
}

}  // namespace
}  // namespace crossdock::nodes
