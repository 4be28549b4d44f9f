#include <gtest/gtest.h>

#include <string>

#include "crossdock/crossdock.hpp"
#include "crossdock/planner.hpp"
#include "dispatch/random_case.hpp"

namespace crossdock {
namespace {

const DispatchConfig kConfig{.num_experts = 64, .top_k = 8, .width = 16};

CostInputs inputs_of(const Topology& topology, int64_t tokens = 4096) {
  return {.config = kConfig, .topology = topology, .tokens = tokens};
}

StrategyChoice choose(const CostInputs& inputs) {
  return choose_strategy(inputs, estimate_costs(inputs).strategies);
}

TEST(ChooseStrategy, CostsComeInTheOrderOfTheNames) {
  std::vector<std::string> names;
  for (const StrategyCost& cost : estimate_costs(inputs_of(Topology::single_node(4))).strategies) {
    names.push_back(cost.name);
  }
  EXPECT_EQ(names, strategy_names());
}

TEST(ChooseStrategy, TakesDirectInOneNodeAndHierarchicalBetweenNodes) {
  EXPECT_EQ(choose(inputs_of(Topology::single_node(1))).name, "direct");
  EXPECT_EQ(choose(inputs_of(Topology::single_node(8))).name, "direct");
  EXPECT_EQ(choose(inputs_of(Topology::uniform(16, 8))).name, "hierarchical");
  EXPECT_EQ(choose(inputs_of(Topology::uniform(64, 8))).name, "hierarchical");
}

TEST(ChooseStrategy, TakesDirectWhereEveryRankIsANode) {
  EXPECT_EQ(choose(inputs_of(Topology::uniform(8, 1))).name, "direct");
}

TEST(ChooseStrategy, SaysHowManyRowsTravelAndWhatTheNextBestWouldDo) {
  const std::string reason = choose(inputs_of(Topology::uniform(8, 4))).reason;
  EXPECT_NE(reason.find("0.998 rows per token between nodes"), std::string::npos) << reason;
  EXPECT_NE(reason.find("direct, the next best, 2.72 rows"), std::string::npos) << reason;
}

TEST(ChooseStrategy, PassesOverWhatDoesNotFitTheMemory) {
  CostInputs inputs = inputs_of(Topology::uniform(256, 8));
  const auto costs = estimate_costs(inputs).strategies;
  ASSERT_EQ(choose_strategy(inputs, costs).name, "hierarchical");
  inputs.fabric.memory_bytes = static_cast<int64_t>(costs[3].memory.expected.total()) - 1;
  ASSERT_LT(costs[1].memory.expected.total(), costs[3].memory.expected.total());
  EXPECT_EQ(choose_strategy(inputs, costs).name, "alltoall");
}

TEST(ChooseStrategy, NoTokensAndNoRoutesOfItsOwnAreNormal) {
  EXPECT_EQ(choose(inputs_of(Topology::uniform(8, 4), 0)).name, "direct");
  EXPECT_EQ(choose(inputs_of(Topology::uniform(96, 8))).name,
            "hierarchical");  // 32 without experts
}

TEST(ChooseStrategy, RefusesAWrongConfigurationAndNamesTheLargestLegalValue) {
  CostInputs inputs = inputs_of(Topology::single_node(4));
  inputs.config.num_experts = 1 << 17;
  inputs.zipf = 1;
  try {
    estimate_costs(inputs);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the largest top_k is 2"), std::string::npos)
        << error.what();
  }
}

TEST(ChooseStrategy, TakesTheMoreUsualOfTwoThatAreAsGood) {
  const CostInputs inputs = inputs_of(Topology::uniform(16, 8));
  std::vector<StrategyCost> costs = estimate_costs(inputs).strategies;
  const auto choose_at = [&](double time_of_hierarchical) {
    for (StrategyCost& cost : costs) {
      cost.step_serial_s = cost.name == "hierarchical" ? time_of_hierarchical : 1.0;
    }
    return choose_strategy(inputs, costs).name;
  };
  EXPECT_EQ(choose_at(0.99), "direct");
  EXPECT_EQ(choose_at(0.97), "hierarchical");
}

// Two ranks have half of the experts each, and all experts are chosen: every token goes to both.
TEST(StrategyRequests, AreTheSendsAndReceivesOfARank) {
  CostInputs inputs = inputs_of(Topology::uniform(2, 1), 1000);
  inputs.config.top_k = inputs.config.num_experts = 2;
  inputs.mpi.chunk_bytes = 1000 * inputs.config.width * 2 / 4;  // bf16, in four messages
  for (const StrategyCost& cost : estimate_costs(inputs).strategies) {
    EXPECT_EQ(cost.dispatch.requests, 4 + 4) << cost.name;
  }
}

// The error names the difference in configuration, not the strategies that follow from it.
TEST(Auto, ADifferentConfigurationIsNamedAsSuch) {
  const auto errors = try_ranks(
      2,
      [&](Group& group) {
        DispatchConfig config = kConfig;
        config.num_experts += group.rank();
        Dispatcher dispatcher(group, config, "auto");
        static_cast<void>(dispatcher.plan(
            Routing{.expert_ids = ConstTensorView(static_cast<const int32_t*>(nullptr), {0, 8}),
                    .weights = ConstTensorView(static_cast<const float*>(nullptr), {0, 8})}));
      },
      short_deadlines());
  for (const std::exception_ptr& error : errors) {
    ASSERT_TRUE(error);
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kMismatch);
      EXPECT_NE(std::string(e.what()).find("num_experts"), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace crossdock
