#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/bench/grid.hpp"
#include "cli/bench/report.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

bench::Result on_gpu() {
  return {.scenario = "layer-qwen3",
          .strategy = "direct",
          .communicator = "cuda",
          .ranks = 1,
          .dtype = "bf16",
          .checked = true,
          .steps = {{.name = "router",
                     .median_us = 15.0,
                     .min_us = 14.0,
                     .max_us = 16.0,
                     .bytes = 38'000'000,
                     .copy_us = 9.0,
                     .gflops = 286'000.0,
                     .flops = 4.29e9,
                     .floor_us = 10.0},
                    {.name = "nothing", .median_us = 2.0, .min_us = 2.0, .max_us = 2.0}}};
}

TEST(BenchReport, ShowsStepsOfAGpuBesideTheirFloor) {
  const std::string text = result_text(on_gpu(), {.width = 100});
  for (const char* words : {"x floor", "TFLOP/s", "38.0", "4.29", "10.0", "1.50", "286.0"}) {
    EXPECT_THAT(text, HasSubstr(words));
  }
  EXPECT_THAT(text, Not(HasSubstr("% of BLAS")));
}

TEST(BenchReport, ReadsWhatItWrites) {
  const std::string text = to_json(std::vector{on_gpu()});
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json[0]["steps"]["router"]["floor_ratio"], 1.5);
  EXPECT_FALSE(json[0]["steps"]["nothing"].contains("floor_us"));
  const std::vector<bench::Result> read = parse_results(text);
  ASSERT_EQ(read.size(), 1U);
  EXPECT_EQ(read[0].steps[0].floor_us, 10.0);
  EXPECT_EQ(read[0].steps[0].flops, 4.29e9);
  EXPECT_EQ(to_json(read), text);
}

// As wide as eight steps on a GPU.
TEST(BenchReport, ContinuesStepsThatDoNotFitInAnotherTable) {
  std::vector<bench::Result> results(2, on_gpu());
  for (bench::Result& result : results) {
    result.steps.clear();
    for (const char* name : {"nothing", "plan", "dispatch", "plan+dispatch", "combine",
                             "dispatch_backward", "combine_backward", "plan+disp.+combine"}) {
      result.steps.push_back({.name = name, .median_us = 123.4, .bytes = 8, .copy_us = 100.0});
    }
  }
  results[0].tokens = 128;
  results[1].tokens = 65536;
  const Grid grid = make_grid(results);
  EXPECT_EQ(grid.titles[0], "tokens");
  EXPECT_EQ(grid.num_sizes, 1U);
  EXPECT_EQ(grid.rows[1][2], "123.4 (1.23)");
  const std::string text = grid_text(grid, {.width = 80});
  size_t num_heads = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), 80U) << line;
    num_heads += line.starts_with("  tokens") ? 1 : 0;
  }
  EXPECT_EQ(num_heads, 2U);
  EXPECT_THAT(text, HasSubstr("plan+disp.+combine"));
}

}  // namespace
}  // namespace crossdock::cli
