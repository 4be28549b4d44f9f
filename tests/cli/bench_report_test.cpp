#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/bench/documents.hpp"
#include "cli/bench/grid.hpp"
#include "cli/bench/report.hpp"
#include "cli/bench/results_json.hpp"

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

// 8 GPUs whose links carry 400 GB/s; a dispatch moves 80 MB over the busiest of them in 250 us.
bench::Result on_gpus() {
  return {.scenario = "custom-cuda",
          .strategy = "direct",
          .communicator = "cuda",
          .ranks = 16,
          .gpus = 8,
          .link_rate = 400.0,
          .dtype = "bf16",
          .repeat = 7,
          .checked = true,
          .steps = {{.name = "plan", .median_us = 20.0, .bytes = 1000, .copy_us = 1.0},
                    {.name = "dispatch",
                     .median_us = 250.0,
                     .bytes = 1'000'000,
                     .copy_us = 200.0,
                     .link_bytes = 80'000'000}}};
}

TEST(BenchReport, ShowsTheLinkBesideItsRate) {
  const std::string text = result_text(on_gpus(), {.width = 120});
  EXPECT_THAT(text, HasSubstr("direct, cuda, 8 GPUs, link 400.0 GB/s per GPU and direction"));
  for (const char* words : {"link GB/s", "% of link", "320.0", " 80"}) {
    EXPECT_THAT(text, HasSubstr(words));
  }
  EXPECT_THAT(result_text(on_gpu(), {.width = 120}), Not(HasSubstr("link")));
}

TEST(BenchReport, SaysThatMemoryIsTheWireOfOneGpu) {
  bench::Result shared = on_gpus();
  shared.gpus = 1;
  shared.link_rate = 0.0;
  shared.steps[1].link_bytes = 0;
  EXPECT_THAT(result_text(shared, {.width = 120}), HasSubstr("1 GPU, whose memory is the wire"));
}

TEST(BenchReport, ShowsTheLinkOfEverySizeInASweep) {
  std::vector<bench::Result> results(2, on_gpus());
  results[1].tokens = 128;
  const Grid grid = make_grid(results);
  EXPECT_THAT(grid.heading, HasSubstr("8 GPUs, link 400.0 GB/s"));
  EXPECT_EQ(grid.rows[0][1], "20.0 (20.00)");
  EXPECT_EQ(grid.rows[0][2], "250.0 (320 GB/s)");
  EXPECT_THAT(grid.unit, HasSubstr("link GB/s"));
}

TEST(BenchReport, ReadsTheLinkThatItWrites) {
  const std::string text = to_json(std::vector{on_gpus()});
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json[0]["gpus"], 8);
  EXPECT_EQ(json[0]["link_rate_gb_per_s"], 400.0);
  EXPECT_EQ(json[0]["steps"]["dispatch"]["link_bytes"], 80'000'000);
  EXPECT_EQ(json[0]["steps"]["dispatch"]["link_gb_per_s"], 320.0);
  EXPECT_FALSE(json[0]["steps"]["plan"].contains("link_bytes"));
  EXPECT_EQ(to_json(parse_results(text)), text);
}

RunDescription described_run() {
  return {.origin = {.version = "1",
                     .build = "Release build",
                     .host = "node7",
                     .num_cores = 2,
                     .num_usable_cores = 2,
                     .time = "now",
                     .command = "crossdock bench"},
          .gpu = "NVIDIA H200",
          .num_gpus = 8,
          .driver = "580",
          .samples = 7};
}

TEST(BenchDocuments, HaveTheGpusAndTheLink) {
  const std::string head = csv_head(described_run());
  EXPECT_THAT(head, HasSubstr("# GPU: 8 x NVIDIA H200, driver 580"));
  EXPECT_THAT(head, HasSubstr(",gpus,link_bytes,link_gb_per_s,link_rate_gb_per_s\n"));
  EXPECT_THAT(csv_lines(on_gpus()), HasSubstr(",8,80000000,320.000,400.000\n"));
  EXPECT_THAT(csv_lines(on_gpus()), HasSubstr(",8,,,400.000\n"));  // the plan
  const std::string page = to_markdown(described_run(), {on_gpus()}, /*is_sweep=*/false);
  EXPECT_THAT(page, HasSubstr("| link GB/s | link rate |"));
  EXPECT_THAT(page, HasSubstr("| 320.0 | 400.0 |"));
  const auto json = nlohmann::json::parse(to_json(described_run(), {on_gpus()}));
  EXPECT_EQ(json["run"]["gpus"], 8);
  EXPECT_EQ(json["results"][0]["gpus"], 8);
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
  const std::string text = grid_text(results, {.width = 80});
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
