// Properties that must hold on any nodes, with any communicator.

#include <gtest/gtest.h>

#include <array>
#include <random>

#include "cost/step_sizes.hpp"
#include "dispatch/payload.hpp"
#include "nodes/node_runner.hpp"
#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::nodes {
namespace {

constexpr int64_t kExpertsPerRank = 4;
constexpr int64_t kTopK = 3;
constexpr int64_t kWidth = 5;

std::string name_of(const Shape& shape) {
  return std::to_string(shape.size) + " ranks, " + std::to_string(shape.ranks_per_node) +
         " per node";
}

// Little staging memory, so rows between nodes need several rounds.
GroupOptions few_bytes_at_a_time() {
  GroupOptions options = conformance::test_deadlines();
  options.staging_bytes = 1024;
  return options;
}

// Routes of every rank to the experts [first, last).
conformance::World world_with(DispatchConfig config, int num_ranks, int64_t first, int64_t last) {
  conformance::World world{.name = "nodes", .config = std::move(config), .ranks = {}};
  world.exact_sums = world.config.partial_sums != PartialSums::kNone;
  std::mt19937 random(7);
  std::vector<int64_t> experts(static_cast<size_t>(last - first));
  std::iota(experts.begin(), experts.end(), first);
  for (int rank = 0; rank < num_ranks; ++rank) {
    reference::RankInput input;
    input.T = 9 + 4 * (rank % 3);
    for (int64_t t = 0; t < input.T; ++t) {
      std::shuffle(experts.begin(), experts.end(), random);
      for (size_t k = 0; k < static_cast<size_t>(kTopK); ++k) {
        input.expert_ids.push_back(k < experts.size() ? experts[k] : -1);
        input.weights.push_back(static_cast<double>(random() % 16) / 16.0);
      }
    }
    world.ranks.push_back(std::move(input));
  }
  return world;
}

void expect_judged_right(Group& group, const conformance::World& world) {
  for (const std::string& strategy : strategy_names()) {
    const auto findings = conformance::judge(
        group, [&] { return make_strategy(strategy); }, world);
    for (const std::string& finding : findings) ADD_FAILURE() << strategy << ": " << finding;
  }
}

constexpr std::array kAllPartialSums = {PartialSums::kNone, PartialSums::kF32,
                                        PartialSums::kRowType};

DispatchConfig config_of(int64_t num_experts, PartialSums partial_sums) {
  return {
      .num_experts = num_experts, .top_k = kTopK, .width = kWidth, .partial_sums = partial_sums};
}

TEST(Nodes, MayReceiveNothing) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    run_on(
        shape,
        [](Group& group) {
          // All routes go to the experts of the first node.
          const auto first_node = std::ssize(group.topology().ranks_of_node(0));
          for (const PartialSums partial_sums : kAllPartialSums) {
            expect_judged_right(group,
                                world_with(config_of(kExpertsPerRank * group.size(), partial_sums),
                                           group.size(), 0, kExpertsPerRank * first_node));
          }
        },
        few_bytes_at_a_time());
  }
}

TEST(Nodes, MayHaveNoExperts) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    run_on(
        shape,
        [](Group& group) {
          // The last node has all experts.
          const auto owners = group.topology().ranks_of_node(group.topology().num_nodes - 1);
          constexpr int64_t kExperts = 7;
          for (const PartialSums partial_sums : kAllPartialSums) {
            DispatchConfig config = config_of(kExperts, partial_sums);
            for (size_t e = 0; e < kExperts; ++e) {
              config.placement.push_back(owners[e % owners.size()]);
            }
            expect_judged_right(group, world_with(config, group.size(), 0, kExperts));
          }
        },
        few_bytes_at_a_time());
  }
}

TEST(Nodes, SendToTheByteWhatTheModelCountsFromTheRoutes) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    run_on(
        shape,
        [](Group& group) {
          for (const PartialSums partial_sums : kAllPartialSums) {
            Routes routes = random_routes(config_of(13, partial_sums), group.topology(), 90,
                                          /*holes=*/true);
            routes.dtype = DType::kBF16;
            const RowBytes row_bytes =
                row_bytes_of({.config = routes.config, .dtype = routes.dtype});
            const Movement movement =
                partial_sums == PartialSums::kNone ? Movement::kCombine : Movement::kPartialSums;
            const RouteSums sums = count(routes);
            const auto rank = static_cast<size_t>(group.rank());
            for (const auto& strategy : built_in_strategies()) {
              const std::string name(strategy->name());
              const StrategyModel& model = strategy->model();
              const Sent sent = send_payload(group, routes, name);
              const LinkFlow out = model.flow(Movement::kDispatch, sums, routes.topology);
              const LinkFlow back = model.flow(movement, sums, routes.topology);
              EXPECT_EQ(static_cast<double>(sent.dispatch.bytes_between_nodes),
                        out.sent_between[rank] * row_bytes.of(Movement::kDispatch))
                  << name;
              EXPECT_EQ(static_cast<double>(sent.combine.bytes_between_nodes),
                        back.sent_between[rank] * row_bytes.of(movement))
                  << name;
            }
          }
        },
        few_bytes_at_a_time());
  }
}

TEST(Nodes, HaveBoundedStagingWhereEverythingGoesToOneRank) {
  const GroupOptions options = few_bytes_at_a_time();
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    run_on(
        shape,
        [&](Group& group) {
          Routes routes{.config = config_of(kExpertsPerRank * group.size(), PartialSums::kNone),
                        .topology = group.topology(),
                        .ids = {}};
          constexpr size_t kTokens = 200;
          for (int rank = 0; rank < group.size(); ++rank) {
            routes.ids.emplace_back();
            for (size_t t = 0; t < kTokens; ++t) {
              for (const int32_t expert : {2, 0, 3}) routes.ids.back().push_back(expert);
            }
          }
          for (const char* strategy : {"direct", "hierarchical"}) {
            send_once(group, routes, strategy);
            for (const Event& event : group.recorder().events()) {
              const std::string operation = event.operation;
              if (std::string_view(event.phase) != "exchange") continue;
              if (operation != "dispatch" && operation != "combine") continue;
              EXPECT_LE(event.bytes, options.staging_bytes) << strategy << " " << operation;
            }
          }
        },
        options);
  }
}

TEST(Nodes, AGroupInsideOneSendsNothingBetweenThem) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    run_on(
        shape,
        [](Group& group) {
          const Topology& topology = group.topology();
          const int node = topology.node_of_rank[static_cast<size_t>(group.rank())];
          const std::unique_ptr<Group> inside = group.subgroup(topology.ranks_of_node(node));
          EXPECT_EQ(inside->topology().num_nodes, 1);
          const Traffic before = group.communicator().traffic();
          expect_judged_right(
              *inside, world_with(config_of(kExpertsPerRank * inside->size(), PartialSums::kNone),
                                  inside->size(), 0, kExpertsPerRank * inside->size()));
          EXPECT_EQ(inside->communicator().traffic().bytes_between_nodes, 0);
          EXPECT_EQ(group.communicator().traffic().bytes_between_nodes, before.bytes_between_nodes);
        },
        conformance::test_deadlines());
  }
}

}  // namespace
}  // namespace crossdock::nodes
