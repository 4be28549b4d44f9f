#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/run/report.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

RunJob small_job() {
  RunArgs args;
  args.steps = 10;
  return make_job(args, nullptr);
}

// The shares of operations that are reported for a step of 100 us.
std::vector<double> shares(const std::vector<OperationTime>& operations) {
  RunResult result;
  result.forward_us = 60;
  result.backward_us = 40;
  result.operations = operations;
  const auto json = nlohmann::json::parse(to_json(small_job(), result, {}));
  std::vector<double> all;
  for (const auto& operation : json["operations"]) all.push_back(operation["share"]);
  return all;
}

TEST(RunReport, SharesAreOfTheStep) {
  EXPECT_THAT(shares({{"dispatch", 20}, {"experts", 50}}), testing::ElementsAre(0.2, 0.5));
}

TEST(RunReport, SharesOfOverlappedOperationsSumToOne) {
  EXPECT_THAT(shares({{"dispatch", 50}, {"experts", 150}}), testing::ElementsAre(0.25, 0.75));
}

TEST(RunReport, SaysThatGpusQueueSteps) {
  RunJob job = small_job();
  RunResult result;
  result.forward_us = 60;
  result.rows_per_rank = {4, 4};
  result.rows_per_expert = {4, 4};
  result.steps_us = {100};
  EXPECT_THAT(to_text(job, result, {.width = 100}), HasSubstr("peak memory per rank"));
  job.device = "cuda";
  result.gpu_of_rank = {0, 1, 0, 1};
  const std::string text = to_text(job, result, {.width = 100});
  for (const char* words : {"on 2 GPUs: 0 1 0 1)", "waiting for the GPU", "those of queueing"}) {
    EXPECT_THAT(text, HasSubstr(words));
  }
  EXPECT_THAT(text, Not(HasSubstr("peak memory")));  // host memory
  const auto json = nlohmann::json::parse(to_json(job, result, {}));
  EXPECT_EQ(json["device"], "cuda");
  EXPECT_THAT(json["gpu_of_rank"], testing::ElementsAre(0, 1, 0, 1));
  result.gpu_of_rank = {0, 0};
  EXPECT_THAT(to_text(job, result, {.width = 100}), HasSubstr("on 1 GPU)"));
}

TEST(RunReport, ExplainsMemoryAboveThePlan) {
  const RunJob job = small_job();
  RunResult result;
  result.rows_per_rank = {6, 2};
  result.rows_per_expert = {4, 4};
  result.memory = {.pool_bytes = 1'000'000, .window_bytes = 240'000};
  result.planned_bytes = 1'200'000;
  EXPECT_THAT(to_text(job, result, {.width = 200}), HasSubstr("planned 1.20 MB\n"));
  result.planned_bytes = 1'000'000;
  EXPECT_THAT(to_text(job, result, {.width = 200}),
              HasSubstr("planned 1.00 MB for even routes (here one rank receives 1.50 x the mean "
                        "number of rows)\n"));
}

TEST(RunReport, DrawsWithoutBlocksWhereTheyCannotBeShown) {
  const RunJob job = small_job();
  RunResult result;
  result.forward_us = 60;
  result.rows_per_rank = {4, 2};
  result.rows_per_expert = {8, 0, 4};
  const std::string text = to_text(job, result, {.width = 100, .has_blocks = false});
  EXPECT_TRUE(std::ranges::all_of(text, [](char c) { return (c & 0x80) == 0; })) << text;
  EXPECT_THAT(text, HasSubstr("1         2  ############\n"));
  EXPECT_THAT(text, HasSubstr("8 4\n"));  // the experts
}

TEST(RunReport, SaysWhichStepsTheTraceLost) {
  const RunJob job = small_job();
  RunResult result;
  result.rows_per_rank = {4, 4};
  result.rows_per_expert = {4, 4};
  result.steps_us = {100};
  EXPECT_THAT(to_text(job, result, {.width = 100}), Not(HasSubstr("trace")));
  result.trace = {.file = "t.json", .num_steps = 7, .num_lost = 3};
  EXPECT_THAT(to_text(job, result, {.width = 100}),
              HasSubstr("t.json: the last 7 of 10 steps; the first 3 are missing or incomplete"));
}

}  // namespace
}  // namespace crossdock::cli
