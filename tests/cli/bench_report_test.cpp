#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

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

}  // namespace
}  // namespace crossdock::cli
