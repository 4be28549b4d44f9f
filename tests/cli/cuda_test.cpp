// The command on GPUs.
#include "crossdock/cuda.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class CommandOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  }

  static json run_json(const std::string& arguments) {
    const CommandResult result = run_command(arguments + " --json");
    EXPECT_EQ(result.status, 0) << arguments << "\n" << result.out << result.err;
    return json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  }
};

constexpr const char* kSmall =
    "run --device cuda --width 64 --inner 32 --experts 10 --top-k 3 --tokens-total 301 --steps 2 ";

TEST_F(CommandOnGpu, RunsEveryDtypeAndModel) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    const json result =
        run_json(std::string(kSmall) + "--ranks 2 --shared-inner 16 --dtype " + dtype);
    EXPECT_EQ(result["device"], "cuda");
    EXPECT_EQ(result["check"]["passed"], true) << result;
    EXPECT_EQ(result["check"]["experts"], 2);
  }
  for (const char* preset : {"deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"}) {
    const json result = run_json(
        "run --device cuda --dtype bf16 --steps 1 --tokens 40 --ranks 2 --scale 16 --preset " +
        std::string(preset));
    EXPECT_EQ(result["check"]["passed"], true) << result;
  }
}

TEST_F(CommandOnGpu, PrintsTheSameChecksumForAnyNumberOfRanks) {
  const json alone = run_json(std::string(kSmall) + "--dtype bf16 --ranks 1");
  for (const char* others : {"--ranks 2", "--ranks 4", "--ranks 4 --strategy alltoall",
                             "--ranks 2 --overlap 3", "--ranks 4 --overlap 2 --overlap-sms 8"}) {
    const json result = run_json(std::string(kSmall) + "--dtype bf16 " + others);
    EXPECT_EQ(result["checksum"], alone["checksum"]) << others;
    EXPECT_EQ(result["grad_checksum"], alone["grad_checksum"]) << others;
    int64_t rows = 0;
    for (const json& count : result["load"]["rows_per_expert"]) rows += count.get<int64_t>();
    EXPECT_EQ(rows, 3 * 301) << others;
    EXPECT_EQ(result["load"]["rows_per_expert"], alone["load"]["rows_per_expert"]) << others;
  }
}

TEST_F(CommandOnGpu, SharesTheGpusRoundRobin) {
  const json info = run_json("info");
  ASSERT_EQ(info["gpus"].size(), static_cast<size_t>(cuda_device_count()));
  EXPECT_GT(info["gpus"][0]["memory_bytes"], 0);
  for (const char* communicator : {"threads", "sockets"}) {
    const json result =
        run_json(std::string(kSmall) + "--dtype bf16 --ranks 2 --communicator " + communicator);
    EXPECT_EQ(result["gpu_of_rank"], json({0, 1 % cuda_device_count()})) << communicator;
    EXPECT_EQ(result["check"]["passed"], true) << result;
  }
}

TEST_F(CommandOnGpu, HandlesRanksWithoutTokensAndExperts) {
  const json few = run_json("run --device cuda --experts 2 --top-k 1 --ranks 4 --tokens-total 3");
  EXPECT_EQ(few["check"]["passed"], true) << few;
  const json none = run_json("run --device cuda --tokens 0 --ranks 2");
  EXPECT_EQ(none["check"]["passed"], true) << none;
}

TEST_F(CommandOnGpu, PrintsATableAndATrace) {
  const std::string file = testing::TempDir() + "crossdock_cuda_trace.json";
  const CommandResult result =
      run_command(std::string(kSmall) + "--ranks 2 --overlap 3 --trace " + file);
  EXPECT_EQ(result.status, 0) << result.err;
  for (const char* words : {"GPU", "up to 3 chunks", "dispatch", "waiting for the GPU",
                            "rows per expert", "passed", "checksum", "trace"}) {
    EXPECT_THAT(result.out, HasSubstr(words));
  }
  std::ifstream trace(file);
  const std::string text((std::istreambuf_iterator<char>(trace)), std::istreambuf_iterator<char>());
  EXPECT_FALSE(json::parse(text, nullptr, /*allow_exceptions=*/false).is_discarded());
  EXPECT_THAT(text, HasSubstr("dispatch chunk"));
  std::remove(file.c_str());
}

TEST_F(CommandOnGpu, VerifiesLayersAndDispatchers) {
  const json layers = run_json("verify --device cuda --case layer --ranks 1,2,4");
  EXPECT_EQ(layers["passed"], true) << layers.dump(1);
  for (const json& cell : layers["results"]) {
    EXPECT_EQ(cell["device"], "cuda");
    EXPECT_EQ(cell["checks"], 36);
  }
  const json rest = run_json("verify --device cuda --quick --strategy direct --ranks 2");
  EXPECT_EQ(rest["passed"], true) << rest.dump(1);
}

TEST_F(CommandOnGpu, MeasuresProductsAndALayer) {
  const json results = run_json(
      "bench --device cuda --scenario grouped-gptoss-skewed,layer-gptoss --repeat 2 --warm-up 1");
  ASSERT_EQ(results.size(), 2U);
  for (const json& result : results) {
    for (const auto& [name, step] : result["steps"].items()) {
      EXPECT_GT(step["median_us"], 0.0) << name;
      EXPECT_GT(step.value("floor_ratio", 1.0), 0.5) << name;
    }
  }
}

TEST_F(CommandOnGpu, MeasuresRanksThatAreProcesses) {
  const json results = run_json(
      "bench --device cuda --tokens 32 --width 256 --experts 16 --top-k 4 --ranks 2 --repeat 2 "
      "--warm-up 1 --communicator sockets,threads");
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results[0]["communicator"], "sockets");
  EXPECT_EQ(results[1]["communicator"], "cuda");
  for (const json& result : results) {
    EXPECT_EQ(result["checked"], true);
    EXPECT_EQ(result["gpus"], std::min(2, cuda_device_count()));
    EXPECT_GT(result["steps"]["dispatch"]["median_us"], 0.0);
  }
}

TEST_F(CommandOnGpu, MeasuresSizesOfTheUser) {
  const CommandResult result = run_command(
      "bench --device cuda --tokens 32:128:x2 --width 256 --experts 16 --top-k 4 --dtype fp16 "
      "--ranks 2,4 --repeat 3 --warm-up 1 --format json");
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const json document = json::parse(result.out);
  EXPECT_NE(document.at("run").at("gpu"), "") << document.at("run");
  EXPECT_NE(document.at("run").at("driver"), "") << document.at("run");
  const json& results = document.at("results");
  ASSERT_EQ(results.size(), 6U);
  for (const json& one : results) {
    EXPECT_EQ(one.at("scenario"), "custom-cuda");
    EXPECT_EQ(one.at("dtype"), "fp16");
    EXPECT_EQ(one.at("width"), 256);
    EXPECT_EQ(one.at("checked"), true);
    for (const char* step : {"plan", "dispatch", "combine", "combine_backward"}) {
      EXPECT_GT(one.at("steps").at(step).at("median_us"), 0.0) << step;
      EXPECT_GE(one.at("steps").at(step).at("p90_us"), one.at("steps").at(step).at("p10_us"));
    }
  }
  EXPECT_EQ(results.at(0).at("ranks"), 2);
  EXPECT_EQ(results.at(2).at("tokens"), 128);
  EXPECT_EQ(results.at(5).at("ranks"), 4);
}

}  // namespace
}  // namespace crossdock::cli
