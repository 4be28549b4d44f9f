// The figures of docs/planner.md, section "Against published figures".
#include <gtest/gtest.h>

#include "crossdock/model_presets.hpp"
#include "crossdock/planner.hpp"

namespace crossdock {
namespace {

struct Setting {
  const char* name = "";
  const char* fabric = "";
  int64_t nodes = 0;
  int64_t tokens = 0;
  DType dtype = DType::kBF16;
  double published_dispatch = 0;  // bytes per second
  double published_combine = 0;
  double dispatch_over_least = 0;  // published time over the bound, as the page says
  double combine_over_least = 0;
  double dispatch_over_ours = 0;
  double combine_over_ours = 0;
  double partial_over_ours = 0;
};

// GB/s as published; the ratios are those of the page.
constexpr DType kFp8 = DType::kF8E4M3;
constexpr DType kBf16 = DType::kBF16;
const std::vector<Setting> kSettings = {
    {"UCCL-EP", "h200-nvlink-400g", 1, 4096, kFp8, 320e9, 319e9, 1.61, 1.61, 1.06, 1.07, 1.07},
    {"HybridEP", "gb200", 1, 4096, kBf16, 764e9, 737e9, 1.35, 1.40, 0.89, 0.92, 0.92},
    {"DeepEP EP8", "gb200", 1, 8192, kFp8, 726e9, 740e9, 1.42, 1.39, 0.94, 0.92, 0.92},
    {"TRT-LLM", "gb200", 1, 2048, kBf16, 753e9, 728e9, 1.37, 1.41, 0.90, 0.94, 0.94},
    {"DeepEP 8x2", "h100-nvlink-400g", 2, 8192, kFp8, 90e9, 81e9, 1.11, 1.23, 1.11, 0.31, 0.62},
    {"DeepEP 8x4", "h100-nvlink-400g", 4, 8192, kFp8, 61e9, 61e9, 1.09, 1.09, 1.09, 0.49, 0.55},
};

JobPlan plan_of(const Setting& setting) {
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
  return plan_job(job);
}

TEST(Published, TheRatiosOfThePageAreThoseOfThePlanner) {
  for (const Setting& setting : kSettings) {
    SCOPED_TRACE(setting.name);
    const JobPlan plan = plan_of(setting);
    const RoutingEstimate& routing = plan.costs.routing;
    const double rows = static_cast<double>(setting.tokens) *
                        (setting.nodes == 1 ? routing.ranks_per_token : routing.nodes_per_token);
    const double row_out = setting.dtype == kFp8 ? 7168.0 + 4 * 56 : 2 * 7168.0;
    const double row_back = 2 * 7168.0;
    const double dispatch = rows * row_out / setting.published_dispatch;
    const double combine = rows * row_back / setting.published_combine;
    const double least = plan.costs.least_dispatch.lower_bound_s;
    const StrategyCost& ours = plan.costs.strategies[setting.nodes == 1 ? 2 : 3];
    EXPECT_EQ(ours.name, plan.choice.name);
    constexpr double kRounding = 0.006;
    EXPECT_NEAR(dispatch / least, setting.dispatch_over_least, kRounding);
    EXPECT_NEAR(combine / (least * row_back / row_out), setting.combine_over_least, kRounding);
    EXPECT_NEAR(dispatch / ours.dispatch.lower_bound_s, setting.dispatch_over_ours, kRounding);
    EXPECT_NEAR(combine / ours.combine.lower_bound_s, setting.combine_over_ours, kRounding);
    EXPECT_NEAR(combine / ours.partial_sums.lower_bound_s, setting.partial_over_ours, kRounding);
  }
}

TEST(Published, CountsOfRowsAndBytesAreThePublishedOnes) {
  const JobPlan plan = plan_of({.fabric = "gb200", .nodes = 1, .tokens = 4096, .dtype = kBf16});
  EXPECT_NEAR(plan.costs.routing.ranks_per_token, 5.3, 0.05);
  EXPECT_NEAR(plan.costs.strategies[1].dispatch.bytes.within_node /
                  plan.costs.least_dispatch.bytes.within_node,
              1.51, 0.005);
  EXPECT_NEAR(plan.costs.least_dispatch.memory_traffic, 370e6, 0.5e6);
  EXPECT_NEAR(plan.costs.strategies[2].dispatch.memory_traffic, 529e6, 1e6);

  const JobPlan two =
      plan_of({.fabric = "h100-nvlink-400g", .nodes = 2, .tokens = 4096, .dtype = kBf16});
  EXPECT_NEAR(two.costs.strategies[1].dispatch.bytes.between_nodes /
                  two.costs.strategies[3].dispatch.bytes.between_nodes,
              4.0, 0.05);
}

}  // namespace
}  // namespace crossdock
