// The figures of docs/planner.md, section "Against published figures": a row of the table here is a
// row of the page, to the digits printed there.
#include <gtest/gtest.h>

#include "crossdock/planner.hpp"

namespace crossdock {
namespace {

constexpr DType kFp8 = DType::kF8E4M3;
constexpr DType kBf16 = DType::kBF16;

enum class Way { kOut, kBack };

struct Setting {
  const char* name = "";
  const char* fabric = "";
  int64_t nodes = 0;
  int64_t tokens = 0;
  DType dtype = kBf16;  // of dispatch; combine is bf16
};

// One line of the page. Times in ms.
struct Line {
  Setting setting;
  Way way = Way::kOut;
  double rate = 0;  // GB/s of received rows, as published; 0: a time was published
  double published = 0;
  double least = 0;
  double over_least = 0;
  double ours = 0;
  double over_ours = 0;
  double in_order = 0;  // one node, dispatch: first the link, then the memory
  // Combine: with partial sums in fp32 and in the type of the rows, bf16.
  double ours_fp32_sums = 0;
  double over_fp32_sums = 0;
  double ours_bf16_sums = 0;
  double over_bf16_sums = 0;
};

const Setting kUccl{"UCCL-EP", "h200-nvlink-400g", 1, 4096, kFp8};
const Setting kHybrid{"HybridEP", "gb200", 1, 4096, kBf16};
const Setting kDeepEp{"DeepEP V2, SM100 EP8", "gb200", 1, 8192, kFp8};
const Setting kTrt{"TRT-LLM", "gb200", 1, 2048, kBf16};
const Setting kTwoNodes{"DeepEP V2, SM90 8 x 2", "h100-nvlink-400g", 2, 8192, kFp8};
const Setting kFourNodes{"DeepEP V2, SM90 8 x 4", "h100-nvlink-400g", 4, 8192, kFp8};
const Setting kSmallDeepEp{"DeepEP, 128 tokens", "h100-nvlink-400g", 1, 128, kFp8};
const Setting kSmallTrt{"TRT-LLM, 128 tokens", "gb200", 1, 128, kBf16};

const std::vector<Line> kLines = {
    {kUccl, Way::kOut, 320, 0.501, 0.312, 1.61, 0.312, 1.61, 0.386},
    {kUccl, Way::kBack, 319, 0.975, 0.605, 1.61, 0.913, 1.07, 0, 0.913, 1.07, 0.605, 1.61},
    {kHybrid, Way::kOut, 764, 0.407, 0.302, 1.35, 0.302, 1.35, 0.388},
    {kHybrid, Way::kBack, 737, 0.422, 0.302, 1.40, 0.457, 0.92, 0, 0.457, 0.92, 0.302, 1.40},
    {kDeepEp, Way::kOut, 726, 0.442, 0.312, 1.42, 0.312, 1.42, 0.400},
    {kDeepEp, Way::kBack, 740, 0.840, 0.605, 1.39, 0.913, 0.92, 0, 0.913, 0.92, 0.605, 1.39},
    {kTrt, Way::kOut, 753, 0.206, 0.151, 1.37, 0.151, 1.37, 0.194},
    {kTrt, Way::kBack, 728, 0.214, 0.151, 1.41, 0.228, 0.94, 0, 0.228, 0.94, 0.151, 1.41},
    {kTwoNodes, Way::kOut, 90, 1.341, 1.207, 1.11, 1.207, 1.11},
    {kTwoNodes, Way::kBack, 81, 2.890, 2.341, 1.23, 9.395, 0.31, 0, 4.681, 0.62, 2.341, 1.23},
    {kFourNodes, Way::kOut, 61, 3.588, 3.283, 1.09, 3.283, 1.09},
    {kFourNodes, Way::kBack, 61, 6.958, 6.367, 1.09, 14.09, 0.49, 0, 12.73, 0.55, 6.367, 1.09},
    {kSmallDeepEp, Way::kOut, 0, 0.0426, 0.0097, 4.37, 0.0097, 4.37, 0.0130},
    {kSmallDeepEp, Way::kBack, 0, 0.0720, 0.0189, 3.81, 0.0285, 2.52, 0, 0.0285, 2.52, 0.0189,
     3.81},
    {kSmallTrt, Way::kOut, 0, 0.0317, 0.0094, 3.36, 0.0094, 3.36, 0.0121},
    {kSmallTrt, Way::kBack, 0, 0.0381, 0.0094, 4.03, 0.0143, 2.67, 0, 0.0143, 2.67, 0.0094, 4.03},
};

JobDescription job_of(const Setting& setting) {
  const ModelPreset& model = find_model("deepseek-v3");
  JobDescription job;
  job.width = model.width;
  job.num_experts = model.num_experts;
  job.top_k = model.top_k;
  job.dtype = setting.dtype;
  job.tokens = setting.tokens;
  job.nodes = setting.nodes;
  job.ranks_per_node = 8;
  job.fabric = find_fabric(setting.fabric);
  return job;
}

JobPlan plan_of(const Setting& setting, PartialSums partial_sums = PartialSums::kNone) {
  JobDescription job = job_of(setting);
  job.partial_sums = partial_sums;
  return plan_job(job);
}

// The model's figures for a line, and the published time, from the rate if one is given. In ms.
struct Computed {
  double published = 0;
  double least = 0;
  double ours = 0;
  double in_order = 0;
  double ours_fp32_sums = 0;
  double ours_bf16_sums = 0;
};

// The strategy that the planner chooses in this mode: on one node direct, unless partial sums in
// fp32 are larger than the rows they replace.
const StrategyCost& ours_of(const JobPlan& plan) {
  const bool sums_in_fp32 = plan.inputs.config.partial_sums == PartialSums::kF32;
  const bool is_direct = plan.group_nodes == 1 && !sums_in_fp32;
  const StrategyCost& ours = plan.costs.strategies[is_direct ? 2 : 3];
  EXPECT_EQ(ours.name, plan.choice.name);
  return ours;
}

Computed compute(const Line& line) {
  const JobPlan plan = plan_of(line.setting);
  const RoutingEstimate& routing = plan.costs.routing;
  const double rows = static_cast<double>(line.setting.tokens) *
                      (line.setting.nodes == 1 ? routing.ranks_per_token : routing.nodes_per_token);
  const double row_out = line.setting.dtype == kFp8 ? 7168.0 + 4 * 56 : 2 * 7168.0;
  const double row_back = 2 * 7168.0;
  const StrategyCost& ours = ours_of(plan);
  const auto with_sums = [&](PartialSums sums) {
    if (line.ours_fp32_sums == 0) return 0.0;
    return ours_of(plan_of(line.setting, sums)).partial_sums.lower_bound_s * 1e3;
  };
  const bool is_out = line.way == Way::kOut;
  const double least = plan.costs.least_dispatch.lower_bound_s;
  return {.published = line.rate > 0 ? rows * (is_out ? row_out : row_back) / line.rate / 1e6
                                     : line.published,
          .least = (is_out ? least : least * row_back / row_out) * 1e3,
          .ours = (is_out ? ours.dispatch : ours.combine).lower_bound_s * 1e3,
          .in_order = ours.dispatch.serial_s * 1e3,
          .ours_fp32_sums = with_sums(PartialSums::kF32),
          .ours_bf16_sums = with_sums(PartialSums::kRowType)};
}

// Within half of the last digit: 4 digits, or microseconds with one decimal.
void expect_printed(double got, double printed) {
  const double digit = printed < 0.1 ? 1e-4 : printed < 10 ? 1e-3 : 1e-2;
  EXPECT_NEAR(got, printed, 0.501 * digit);
}

TEST(Published, TimesAndRatiosOfThePageAreThoseOfThePlanner) {
  for (const Line& line : kLines) {
    SCOPED_TRACE(std::string(line.setting.name) + (line.way == Way::kOut ? " out" : " back"));
    const Computed computed = compute(line);
    expect_printed(computed.published, line.published);
    expect_printed(computed.least, line.least);
    expect_printed(computed.ours, line.ours);
    EXPECT_NEAR(computed.published / computed.least, line.over_least, 0.00501);
    EXPECT_NEAR(computed.published / computed.ours, line.over_ours, 0.00501);
    if (line.in_order > 0) expect_printed(computed.in_order, line.in_order);
    if (line.ours_fp32_sums == 0) continue;
    expect_printed(computed.ours_fp32_sums, line.ours_fp32_sums);
    expect_printed(computed.ours_bf16_sums, line.ours_bf16_sums);
    EXPECT_NEAR(computed.published / computed.ours_fp32_sums, line.over_fp32_sums, 0.00501);
    EXPECT_NEAR(computed.published / computed.ours_bf16_sums, line.over_bf16_sums, 0.00501);
    EXPECT_NEAR(computed.ours_bf16_sums, computed.least, 1e-9);  // the same bytes
  }
}

// The page explains differences above 15 % in groups; every line must be in one of them.
TEST(Published, EveryDifferenceAboveFifteenPercentIsInAnExplainedRange) {
  for (const Line& line : kLines) {
    SCOPED_TRACE(std::string(line.setting.name) + (line.way == Way::kOut ? " out" : " back"));
    const Computed computed = compute(line);
    const double over_least = computed.published / computed.least;
    const double over_ours = computed.published / computed.ours;
    const bool is_small = line.setting.tokens == 128;
    if (is_small) {
      EXPECT_TRUE(over_least > 3.35 && over_least < 4.38) << over_least;
      EXPECT_TRUE(over_ours > 2.51 && over_ours < 4.38) << over_ours;
    } else if (line.setting.nodes == 1) {
      EXPECT_TRUE(over_least > 1.345 && over_least < 1.615) << over_least;
      EXPECT_NEAR(over_ours, line.way == Way::kOut ? over_least : 1.0, 0.115);
    } else if (line.way == Way::kOut) {
      EXPECT_NEAR(over_least, 1.0, 0.15);
      EXPECT_NEAR(over_ours, 1.0, 0.15);
    } else {
      if (line.setting.nodes == 2) {
        EXPECT_NEAR(over_least, 1.23, 0.005);
      } else {
        EXPECT_NEAR(over_least, 1.0, 0.15);
      }
      const double over_partial = computed.ours_fp32_sums / computed.published;
      EXPECT_TRUE(1 / over_ours > 2.02 && 1 / over_ours < 3.255) << 1 / over_ours;
      EXPECT_TRUE(over_partial > 1.615 && over_partial < 1.835) << over_partial;
    }
  }
}

// The published figures stop before rows are in the order of their experts.
TEST(Published, RowsOfOneNodeAreInTheirFinalOrderBeforeOthersHaveThemInABuffer) {
  int num_lines = 0;
  for (const Line& line : kLines) {
    if (line.setting.nodes > 1 || line.way != Way::kOut) continue;
    const Computed computed = compute(line);
    EXPECT_LT(computed.in_order, computed.published) << line.setting.name;
    ++num_lines;
  }
  EXPECT_EQ(num_lines, 6);
}

// The link of an H800, unlike that of an H100, has 200 GB/s.
TEST(Published, SmallBatchesOnASlowerLinkAreCloser) {
  const Computed out = compute(kLines[12]);
  const Computed back = compute(kLines[13]);
  EXPECT_NEAR(out.ours * 450 / 200, 0.0219, 0.00005);
  EXPECT_NEAR(back.ours * 450 / 200, 0.0642, 0.00005);
  EXPECT_NEAR(out.published / (out.ours * 450 / 200), 1.94, 0.005);
  EXPECT_NEAR(back.published / (back.ours * 450 / 200), 1.12, 0.005);
}

TEST(Published, CountsOfRowsAndBytesAreThePublishedOnes) {
  const JobPlan plan = plan_of({.fabric = "gb200", .nodes = 1, .tokens = 4096, .dtype = kBf16});
  EXPECT_NEAR(plan.costs.routing.ranks_per_token, 5.295, 0.0005);
  EXPECT_NEAR(plan.costs.least_dispatch.rows.within_node / 4096, 4.633, 0.0005);
  EXPECT_NEAR(plan.costs.strategies[1].dispatch.bytes.within_node /
                  plan.costs.least_dispatch.bytes.within_node,
              1.51, 0.005);
  EXPECT_NEAR(plan.costs.least_dispatch.memory_traffic, 370e6, 0.5e6);
  EXPECT_NEAR(plan.costs.strategies[2].dispatch.rows.within_node / 4096, 4.633, 0.0005);
  EXPECT_NEAR(plan.costs.strategies[2].partial_sums.rows.within_node / 4096, 4.633, 0.0005);
  EXPECT_NEAR(plan.costs.strategies[2].combine.rows.within_node / 4096, 7, 0.0005);

  JobDescription with_copies = job_of(kHybrid);
  with_copies.copies = Copies::kPerRoute;
  const OperationCost per_route = plan_job(with_copies).costs.strategies[2].dispatch;
  EXPECT_NEAR(per_route.rows.within_node / 4096, 7, 0.0005);
  EXPECT_NEAR(per_route.memory_traffic, 529e6, 1e6);

  const JobPlan two = plan_of(kTwoNodes);
  EXPECT_NEAR(two.costs.routing.nodes_per_token, 1.993, 0.0005);
  EXPECT_NEAR(two.costs.least_dispatch.rows.between_nodes / 8192, 0.997, 0.0005);
  EXPECT_NEAR(two.costs.strategies[1].dispatch.bytes.between_nodes /
                  two.costs.strategies[3].dispatch.bytes.between_nodes,
              4.0, 0.05);
  const JobPlan four = plan_of(kFourNodes);
  EXPECT_NEAR(four.costs.routing.nodes_per_token, 3.614, 0.0005);
  EXPECT_NEAR(four.costs.least_dispatch.rows.between_nodes / 8192, 2.711, 0.0005);
}

}  // namespace
}  // namespace crossdock
