#include "crossdock/planner.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "planner/job_mesh.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using testing::AllOf;
using testing::HasSubstr;

JobDescription job_of(std::string_view model, int64_t tokens, int64_t nodes = 2) {
  const ModelPreset& preset = find_model(model);
  JobDescription job;
  job.width = preset.width;
  job.inner = preset.inner;
  job.num_experts = preset.num_experts;
  job.top_k = preset.top_k;
  job.tokens = tokens;
  job.nodes = nodes;
  job.ranks_per_node = 8;
  return job;
}

std::string refusal_of(const JobDescription& job) {
  return message_of([&] { plan_job(job); });
}

TEST(Planner, ShowsTheJobThatDiesOfItsQueueElsewhere) {
  JobDescription job = job_of("qwen3-30b-a3b", 0);
  job.tokens.reset();
  job.sequence = 8192;
  job.micro_batch = 8;
  const JobPlan plan = plan_job(job);
  EXPECT_EQ(plan.inputs.tokens, 65536);
  EXPECT_EQ(plan.dispatch_queue.entries, 196609);
  EXPECT_FALSE(plan.dispatch_queue.fits);
  EXPECT_EQ(plan.dispatch_queue.largest_tokens, 21844);
  EXPECT_EQ(plan.dispatch_queue.largest_rounded_tokens, 21824);
  EXPECT_EQ(plan.combine_queue.entries, 131073);
  EXPECT_EQ(plan.choice.name, "hierarchical");
  for (const StrategyCost& cost : plan.costs.strategies) {
    EXPECT_LE(cost.max_in_flight, 128) << cost.name;
  }
}

TEST(Planner, TheLargestTokenCountOfTheSchemeFitsAndOneMoreDoesNot) {
  EXPECT_TRUE(plan_job(job_of("qwen3-30b-a3b", 21844)).dispatch_queue.fits);
  EXPECT_FALSE(plan_job(job_of("qwen3-30b-a3b", 21845)).dispatch_queue.fits);
  JobDescription full = job_of("qwen3-30b-a3b", 100);
  full.fabric.send_queue_depth = 301;
  EXPECT_EQ(plan_job(full).dispatch_queue.entries, 301);
  EXPECT_TRUE(plan_job(full).dispatch_queue.fits);
}

// Per token of 2 nodes x 4 ranks, K8 E64; C(32,8)/C(64,8) and C(56,8)/C(64,8) by hand.
TEST(Planner, RowsBetweenNodesAreTheHypergeometricOnes) {
  JobDescription job;
  job.width = 16;
  job.num_experts = 64;
  job.top_k = 8;
  job.tokens = 1000;
  job.nodes = 2;
  job.ranks_per_node = 4;
  job.dtype = DType::kF32;
  const JobPlan plan = plan_job(job);
  const double misses_node = 10518300.0 / 4426165368.0;
  const double misses_rank = 1420494075.0 / 4426165368.0;
  EXPECT_NEAR(plan.costs.routing.nodes_per_token, 2 * (1 - misses_node), 1e-12);
  EXPECT_NEAR(plan.costs.routing.ranks_per_token, 8 * (1 - misses_rank), 1e-12);
  const StrategyCost& alltoall = plan.costs.strategies[1];
  const StrategyCost& hierarchical = plan.costs.strategies[3];
  EXPECT_NEAR(alltoall.dispatch.rows.between_nodes, 4000, 1e-9);
  EXPECT_NEAR(hierarchical.dispatch.rows.between_nodes, 1000 * (1 - misses_node), 1e-9);
  EXPECT_LE(hierarchical.dispatch.bytes.between_nodes,
            0.26 * alltoall.dispatch.bytes.between_nodes);
  EXPECT_LE(hierarchical.partial_sums.bytes.between_nodes,
            0.26 * alltoall.combine.bytes.between_nodes);
  EXPECT_LE(hierarchical.partial_sums.bytes.between_nodes,
            0.38 * alltoall.partial_sums.bytes.between_nodes);
  EXPECT_DOUBLE_EQ(hierarchical.combine.bytes.between_nodes, alltoall.combine.bytes.between_nodes);
}

TEST(Planner, PartialSumsInTheRowTypeSendHalfTheBytesOfFp32BetweenNodes) {
  JobDescription job = job_of("deepseek-v3", 4096, 2);
  const auto plan_with = [&](DType dtype, PartialSums sums) {
    job.dtype = dtype;
    job.partial_sums = sums;
    return plan_job(job).costs.strategies;
  };
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF8E4M3}) {  // results of fp8: bf16
    const std::vector<StrategyCost> exact = plan_with(dtype, PartialSums::kNone);
    const std::vector<StrategyCost> fp32 = plan_with(dtype, PartialSums::kF32);
    const std::vector<StrategyCost> rows = plan_with(dtype, PartialSums::kRowType);
    for (size_t i = 0; i < exact.size(); ++i) {
      SCOPED_TRACE(exact[i].name + " " + std::string(name_of(dtype)));
      EXPECT_EQ(rows[i].partial_sums.rows.between_nodes, fp32[i].partial_sums.rows.between_nodes);
      EXPECT_EQ(2 * rows[i].partial_sums.bytes.between_nodes,
                fp32[i].partial_sums.bytes.between_nodes);
      // Without partial sums, their cost is shown in fp32.
      EXPECT_EQ(exact[i].partial_sums.lower_bound_s, fp32[i].partial_sums.lower_bound_s);
      EXPECT_LT(rows[i].step_serial_s, fp32[i].step_serial_s);
      EXPECT_LE(rows[i].memory.expected.total(), fp32[i].memory.expected.total());
    }
  }
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const std::vector<StrategyCost> fp32 = plan_with(dtype, PartialSums::kF32);
    const std::vector<StrategyCost> rows = plan_with(dtype, PartialSums::kRowType);
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i].partial_sums.bytes.between_nodes, fp32[i].partial_sums.bytes.between_nodes);
      EXPECT_EQ(rows[i].step_serial_s, fp32[i].step_serial_s);
    }
  }
}

TEST(Planner, AGroupInsideOneNodeUsesNothingBetweenNodes) {
  JobDescription job = job_of("deepseek-v3", 4096, 4);
  job.ep = 8;
  const JobPlan plan = plan_job(job);
  EXPECT_EQ(plan.num_ranks, 32);
  EXPECT_EQ(plan.group_ranks, 8);
  EXPECT_EQ(plan.group_nodes, 1);
  for (const StrategyCost& cost : plan.costs.strategies) {
    EXPECT_EQ(cost.dispatch.rows.between_nodes, 0) << cost.name;
    EXPECT_EQ(cost.combine.rows.between_nodes, 0) << cost.name;
    EXPECT_EQ(cost.partial_sums.rows.between_nodes, 0) << cost.name;
  }
  EXPECT_EQ(plan.costs.strategies[2].max_in_flight, 0);
  EXPECT_EQ(plan.choice.name, "direct");
}

TEST(Planner, TakesTheExpertGroupThatLiesOnMostNodes) {
  JobDescription job;
  job.nodes = 2;
  job.ranks_per_node = 6;
  job.ep = 4;
  job.tokens = 1;
  const Topology topology = widest_row_group(make_mesh(job), job.ranks_per_node);
  EXPECT_EQ(topology.num_nodes, 2);
  EXPECT_EQ(topology.node_of_rank, (std::vector<int>{0, 0, 1, 1}));
}

TEST(Planner, SequencesAreSharedByTpAndCp) {
  JobDescription job;
  job.sequence = 8192;
  job.micro_batch = 3;
  job.tp = 4;
  job.cp = 2;
  EXPECT_EQ(tokens_of_rank(job), 3072);
  job.sequence = 5;
  EXPECT_EQ(tokens_of_rank(job), 3);  // the largest shard has one token of each sequence
}

TEST(Planner, SkewFillsTheFirstRanks) {
  JobDescription job = job_of("deepseek-v3", 4096, 1);
  const JobPlan even = plan_job(job);
  job.zipf = 1.0;
  const JobPlan skewed = plan_job(job);
  EXPECT_NEAR(even.costs.routing.most_rows, even.costs.routing.rows_per_rank, 1e-6);
  EXPECT_GT(skewed.costs.routing.most_rows, 2 * skewed.costs.routing.rows_per_rank);
  EXPECT_LT(skewed.costs.routing.ranks_per_token, even.costs.routing.ranks_per_token);
  EXPECT_GT(skewed.costs.strategies[2].step_lower_bound_s,
            2 * even.costs.strategies[2].step_lower_bound_s);
}

// Memory must not grow with pairs of ranks: that would be 268 million entries. Sanitizers slow this
// test down more than tenfold.
TEST(Planner, PlansSixteenThousandRanks) {
  JobDescription job = job_of("deepseek-v3", 128, 2048);
  for (const double zipf : {0.0, 0.5}) {
    for (const bool has_capacity : {false, true}) {
      job.zipf = zipf;
      if (has_capacity) job.capacity = 8.0;
      const JobPlan plan = plan_job(job);
      EXPECT_EQ(plan.group_ranks, 16384);
      EXPECT_NEAR(plan.costs.strategies[1].dispatch.rows.within_node +
                      plan.costs.strategies[1].dispatch.rows.between_nodes,
                  128 * 8, 128);
    }
  }
}

TEST(Planner, KnowsTheFabricsAndTheirQueues) {
  double last_bound = 0;
  for (const char* name : {"gb200", "h200-nvlink-400g", "h100-nvlink-400g", "efa", "ethernet"}) {
    JobDescription job = job_of("deepseek-v3", 4096, 1);
    job.fabric = find_fabric(name);
    EXPECT_EQ(job.fabric.send_queue_depth, 65535) << name;
    const double bound = plan_job(job).costs.strategies[2].step_lower_bound_s;
    EXPECT_GE(bound, last_bound) << name << " is not faster inside a node than the one before";
    last_bound = bound;
  }
  EXPECT_EQ(find_fabric("h100-nvlink-400g").between_nodes_rate, 400e9 / 8);
  EXPECT_EQ(find_fabric("ethernet").between_nodes_rate, 25e9 / 8);
  EXPECT_THROW(find_fabric("string"), Error);
}

TEST(Planner, ACapacityDropsRoutesAndTheirTraffic) {
  JobDescription job = job_of("qwen3-30b-a3b", 4096);
  const JobPlan all = plan_job(job);
  job.capacity = 1.0;
  const JobPlan some = plan_job(job);
  EXPECT_EQ(all.costs.routing.dropped_share, 0);
  // A source has 256 routes to an expert on average, with a deviation of about 15.5; the excess of
  // a normal distribution over its mean is 0.4 deviations.
  EXPECT_NEAR(some.costs.routing.dropped_share, 0.4 * 15.5 / 256, 0.001);
  EXPECT_NEAR(some.costs.routing.rows_per_rank, 4096 * 8 * (1 - some.costs.routing.dropped_share),
              1e-3);
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_LT(some.costs.strategies[i].combine.bytes.between_nodes,
              all.costs.strategies[i].combine.bytes.between_nodes);
    EXPECT_LE(some.costs.strategies[i].memory.expected.total(),
              some.costs.strategies[i].memory.with_capacity->total());
  }
}

TEST(Planner, NamesTheLimitTheValueAndTheLargestLegalOne) {
  const auto refusal_with = [](const auto& change) {
    JobDescription job = job_of("qwen3-30b-a3b", 1024);
    change(job);
    return refusal_of(job);
  };
  using Job = JobDescription;
  EXPECT_THAT(refusal_with([](Job& job) { job.mpi.max_in_flight = 70000; }),
              AllOf(HasSubstr("max_in_flight is 70000"), HasSubstr("65535"),
                    HasSubstr("h100-nvlink-400g")));
  EXPECT_THAT(refusal_with([](Job& job) { job.ep = 12; }),
              AllOf(HasSubstr("ep (12)"), HasSubstr("16 ranks"),
                    HasSubstr("largest ep below that does is 8")));
  EXPECT_THAT(refusal_with([](Job& job) { job.pp = 5; }),
              AllOf(HasSubstr("pp (5)"), HasSubstr("is 4")));
  EXPECT_THAT(refusal_with([](Job& job) { job.tp = 3; }),
              AllOf(HasSubstr("tp (3)"), HasSubstr("16 ranks")));
  EXPECT_THAT(refusal_with([](Job& job) { job.nodes = 10000; }),
              AllOf(HasSubstr("nodes (10000)"), HasSubstr("65536"),
                    HasSubstr("largest number of nodes is 8192")));
  EXPECT_THAT(refusal_with([](Job& job) { job.top_k = 129; }),
              AllOf(HasSubstr("num_experts (128)"), HasSubstr("top_k (129)")));
  EXPECT_THAT(refusal_with([](Job& job) { job.zipf = 11; }),
              AllOf(HasSubstr("zipf must be in [0, 10]"), HasSubstr("11")));
  EXPECT_THAT(refusal_with([](Job& job) { job.tokens = -1; }), HasSubstr("tokens must be from 0"));
}

TEST(Planner, WhatDoesNotFitTheMemoryNamesTheLargestTokenCountThatDoes) {
  JobDescription job = job_of("deepseek-v3", 1 << 20);
  job.fabric = find_fabric("ethernet");
  const std::string message = refusal_of(job);
  EXPECT_THAT(message, AllOf(HasSubstr("1048576 tokens"), HasSubstr("48 GB"),
                             HasSubstr("largest number of tokens per rank is ")));
  job.tokens = std::stoll(message.substr(message.rfind(' ')));
  EXPECT_EQ(refusal_of(job), "nothing was thrown");
  ++*job.tokens;
  EXPECT_THAT(refusal_of(job), HasSubstr("largest number of tokens"));
}

TEST(Planner, NoTokensAreNormal) {
  const JobPlan plan = plan_job(job_of("mixtral-8x7b", 0));
  EXPECT_EQ(plan.costs.strategies[0].step_lower_bound_s, 0);
  EXPECT_EQ(plan.dispatch_queue.entries, 1);
}

}  // namespace
}  // namespace crossdock
