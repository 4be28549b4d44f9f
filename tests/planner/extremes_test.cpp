// Every job gets either a clear refusal or finite, non-negative figures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "crossdock/planner.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using testing::HasSubstr;

JobDescription small_job() {
  JobDescription job;
  job.width = 64;
  job.num_experts = 64;
  job.top_k = 4;
  job.tokens = 128;
  job.nodes = 2;
  job.ranks_per_node = 4;
  return job;
}

std::string refusal_of(const JobDescription& job) {
  return message_of([&] { plan_job(job); });
}

bool is_figure(double value) {
  return std::isfinite(value) && value >= 0;
}

bool has_figures(const OperationCost& cost) {
  for (const double value :
       {cost.rows.within_node, cost.rows.between_nodes, cost.bytes.within_node,
        cost.bytes.between_nodes, cost.most_bytes.within_node, cost.most_bytes.between_nodes,
        cost.memory_traffic, cost.requests, cost.rounds, cost.lower_bound_s, cost.serial_s}) {
    if (!is_figure(value)) return false;
  }
  return true;
}

bool has_figures(const MemoryNeed& need) {
  return is_figure(need.window_bytes) && is_figure(need.pool_bytes) && is_figure(need.plan_bytes);
}

bool has_figures(const JobPlan& plan) {
  bool all =
      plan.expert_weight_bytes >= 0 && plan.capacity_rows >= 0 && plan.dispatch_queue.entries > 0 &&
      plan.combine_queue.largest_tokens >= 0 && is_figure(plan.costs.routing.rows_per_rank) &&
      is_figure(plan.costs.routing.most_rows) && is_figure(plan.costs.routing.dropped_share) &&
      is_figure(plan.costs.routing.ranks_per_token) && has_figures(plan.costs.least_dispatch) &&
      plan.choice.reason.find("nan") == std::string::npos;
  for (const StrategyCost& cost : plan.costs.strategies) {
    all = all && has_figures(cost.dispatch) && has_figures(cost.combine) &&
          has_figures(cost.partial_sums) && has_figures(cost.memory.expected) &&
          has_figures(cost.memory.worst_case) && cost.max_in_flight >= 0 &&
          is_figure(cost.step_serial_s) && is_figure(cost.step_lower_bound_s) &&
          (!cost.memory.with_capacity || has_figures(*cost.memory.with_capacity));
  }
  return all;
}

TEST(PlannerExtremes, RefusesRatesThatGiveNoTimes) {
  for (const double rate :
       {0.0, -1.0, 1e-320, 1e300, std::nan(""), std::numeric_limits<double>::infinity()}) {
    JobDescription job = small_job();
    job.fabric.between_nodes_rate = rate;
    EXPECT_THAT(refusal_of(job), HasSubstr("the rates of a fabric must be from 1 to")) << rate;
  }
}

TEST(PlannerExtremes, RefusesSizesThatCannotBeCounted) {
  JobDescription job = small_job();
  job.width = int64_t{1} << 62;
  EXPECT_THAT(refusal_of(job), HasSubstr("width must be"));
  job.width = 2147483647;
  job.tokens = 0;
  job.inner = 2147483647;
  EXPECT_THAT(refusal_of(job), HasSubstr("the expert weights would exceed 2^63 bytes"));
}

// Would take too long with K * E steps.
TEST(PlannerExtremes, PlansAMillionExpertsForEveryToken) {
  JobDescription job = small_job();
  job.num_experts = 1000000;
  job.top_k = 1000000;
  job.tokens = 1;
  EXPECT_EQ(plan_job(job).costs.routing.ranks_per_token, 8);
}

TEST(PlannerExtremes, MemoryBeyondAllCountingIsStillAFigure) {
  JobDescription job = small_job();
  job.width = 2147483647;
  job.tokens = int64_t{1} << 31;
  job.fabric.memory_bytes = 0;
  const JobPlan plan = plan_job(job);
  EXPECT_TRUE(has_figures(plan));
  EXPECT_GT(plan.costs.strategies[0].memory.worst_case.pool_bytes, 1e20);
}

TEST(PlannerExtremes, EveryJobIsRefusedOrHasFigures) {
  std::mt19937_64 random(7);
  const auto one_of = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  const auto rate = [&] {
    constexpr std::array kRates = {50e9, 50e9, 1.0, 1e18, 1e-310, 1e308, 0.0};
    return kRates[random() % kRates.size()];
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int num_planned = 0;
  for (int i = 0; i < 400; ++i) {
    JobDescription job;
    job.width = one_of({1, 7, 4096, 2147483647, 1024, 64, kMost});
    job.inner = one_of({0, 1, 4096, 2147483647, kMost});
    job.num_experts = one_of({1, 8, 100, 4096, 100000, 64, kMost});
    job.top_k = one_of({1, 2, 8, 64, 1, job.num_experts, kMost});
    job.tokens = one_of({0, 1, 4096, 1 << 20, int64_t{1} << 31, 128, kMost});
    job.nodes = one_of({1, 2, 3, 64, 2, kMost});
    job.ranks_per_node = one_of({1, 8, 7, 8, 4, kMost});
    job.partial_sums = static_cast<PartialSums>(random() % kPartialSumsNames.size());
    job.dtype = random() % 2 == 0 ? DType::kF8E4M3 : DType::kF64;
    if (random() % 3 == 0) {
      job.capacity = static_cast<double>(one_of({1, 2, 1 << 20})) * (random() % 2 ? 1.0 : 1e-9);
    }
    if (random() % 8 == 0) job.zipf = static_cast<double>(one_of({1, 10, 11}));
    const double routes = static_cast<double>(job.num_experts) * static_cast<double>(job.top_k);
    if (job.zipf > 0 && routes > 4096) job.zipf = 0;
    job.fabric.within_node_rate = rate();
    job.fabric.memory_rate = rate();
    job.fabric.memory_bytes = one_of({0, 0, 1, 80 * kGigabyte, kMost, -1});
    job.fabric.send_queue_depth = one_of({65535, 65535, kMost});
    job.mpi.max_in_flight = static_cast<int>(one_of({2, 128, 128, 2147483647, 0}));
    job.mpi.chunk_bytes = one_of({1, 4 << 20, 4 << 20, 2147483647, 0});
    try {
      EXPECT_TRUE(has_figures(plan_job(job))) << "job " << i;
      ++num_planned;
    } catch (const Error& error) {
      EXPECT_FALSE(std::string(error.what()).empty());
    }
  }
  EXPECT_GT(num_planned, 10);
}

}  // namespace
}  // namespace crossdock
