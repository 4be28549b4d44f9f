// The planner's answer through the C API equals that of plan_job.
#include "crossdock/planner.hpp"

#include <gtest/gtest.h>

#include <string>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

TEST(CPlanner, AnswersAsPlanJob) {
  JobDescription description;
  description.width = 7168;
  description.inner = 2048;
  description.num_experts = 256;
  description.top_k = 8;
  description.tokens = 4096;
  description.nodes = 4;
  description.ranks_per_node = 8;
  const JobPlan wanted = plan_job(description);

  auto job = made<crossdock_job>();
  job.model = "deepseek-v3";
  job.tokens = 4096;
  job.nodes = 4;
  job.ranks_per_node = 8;
  crossdock_job_plan* plan = nullptr;
  ASSERT_OK(crossdock_job_plan_create(&job, &plan));
  auto summary = made<crossdock_job_summary>();
  ASSERT_OK(crossdock_job_plan_describe(plan, &summary));
  EXPECT_EQ(summary.strategy, wanted.choice.name);
  EXPECT_EQ(summary.reason, wanted.choice.reason);
  EXPECT_EQ(summary.num_ranks, 32);
  EXPECT_EQ(summary.expert_weight_bytes, wanted.expert_weight_bytes);
  ASSERT_EQ(summary.num_strategies, std::ssize(wanted.costs.strategies));
  for (int64_t i = 0; i < summary.num_strategies; ++i) {
    const StrategyCost& strategy = wanted.costs.strategies[static_cast<size_t>(i)];
    auto cost = made<crossdock_strategy_cost>();
    ASSERT_OK(crossdock_job_plan_strategy(plan, i, &cost));
    EXPECT_EQ(cost.name, strategy.name);
    EXPECT_EQ(cost.dispatch.bytes_between_nodes, strategy.dispatch.bytes.between_nodes);
    EXPECT_EQ(cost.step_serial_s, strategy.step_serial_s);
  }
  auto cost = made<crossdock_strategy_cost>();
  EXPECT_EQ(crossdock_job_plan_strategy(plan, summary.num_strategies, &cost),
            CROSSDOCK_INVALID_ARGUMENT);
  crossdock_job_plan_destroy(plan);
}

TEST(CPlanner, TakesTheTypeOfPartialSums) {
  auto job = made<crossdock_job>();
  job.model = "deepseek-v3";
  job.tokens = 4096;
  job.nodes = 2;
  job.ranks_per_node = 8;
  const auto combine_bytes = [&](int32_t partial_sums) {
    job.partial_sums = partial_sums;
    crossdock_job_plan* plan = nullptr;
    EXPECT_EQ(crossdock_job_plan_create(&job, &plan), CROSSDOCK_OK) << crossdock_last_error();
    auto cost = made<crossdock_strategy_cost>();
    EXPECT_EQ(crossdock_job_plan_strategy(plan, 3, &cost), CROSSDOCK_OK);
    crossdock_job_plan_destroy(plan);
    return cost.combine.bytes_between_nodes;
  };
  EXPECT_EQ(combine_bytes(CROSSDOCK_PARTIAL_SUMS_FP32),
            2 * combine_bytes(CROSSDOCK_PARTIAL_SUMS_ROWS));
  EXPECT_GT(combine_bytes(CROSSDOCK_PARTIAL_SUMS_NONE), combine_bytes(CROSSDOCK_PARTIAL_SUMS_FP32));
  job.partial_sums = 3;
  crossdock_job_plan* plan = nullptr;
  EXPECT_EQ(crossdock_job_plan_create(&job, &plan), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_NE(std::string(crossdock_last_error()).find("partial_sums must be in [0, 3), got 3"),
            std::string::npos);
}

TEST(CPlanner, AnUnknownModelListsTheKnownOnes) {
  auto job = made<crossdock_job>();
  job.model = "nonesuch";
  crossdock_job_plan* plan = nullptr;
  EXPECT_EQ(crossdock_job_plan_create(&job, &plan), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_NE(std::string(crossdock_last_error()).find("deepseek-v3"), std::string::npos);
  EXPECT_EQ(plan, nullptr);
}

}  // namespace
}  // namespace crossdock::capi_test
