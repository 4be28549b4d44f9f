#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json measure(const std::string& arguments) {
  const CommandResult result = run_command("bench --json --repeat 2 --warm-up 1 " + arguments);
  EXPECT_EQ(result.status, 0) << result.err;
  return json::parse(result.out);
}

void expect_step(const json& step, int64_t bytes) {
  EXPECT_EQ(step.at("bytes"), bytes);
  EXPECT_GT(step.at("median_us"), 0.0);
  EXPECT_GT(step.at("copy_us"), 0.0);
  EXPECT_NEAR(step.at("ratio").get<double>(),
              step.at("median_us").get<double>() / step.at("copy_us").get<double>(), 1e-9);
}

TEST(Bench, ListsItsScenarios) {
  EXPECT_THAT(run_command("bench --list").out, HasSubstr("cpu-large"));
  const json list = json::parse(run_command("bench --list --json").out);
  EXPECT_EQ(list.at(0).at("scenario"), "cpu-large");
}

TEST(Bench, PrintsOneEntryPerScenarioStrategyAndCommunicator) {
  const json results =
      measure("--scenario decode --strategy alltoall,direct --communicator threads");
  ASSERT_EQ(results.size(), 2U);
  const json& first = results.at(0);
  EXPECT_EQ(first.at("scenario"), "decode");
  EXPECT_EQ(first.at("strategy"), "alltoall");
  EXPECT_EQ(first.at("communicator"), "threads");
  EXPECT_EQ(first.at("ranks"), 4);
  EXPECT_EQ(first.at("tokens"), 16);
  EXPECT_EQ(first.at("width"), 2048);
  EXPECT_EQ(first.at("top_k"), 8);
  EXPECT_EQ(first.at("experts"), 64);
  EXPECT_EQ(first.at("dtype"), "fp32");
  EXPECT_EQ(results.at(1).at("strategy"), "direct");
  for (const char* step : {"dispatch", "combine"}) {
    expect_step(first.at("steps").at(step), int64_t{16 * 2048 + 16 * 8 * 2048} * 4 * 4);
  }
  EXPECT_TRUE(first.at("steps").contains("plan"));
}

TEST(Bench, RunsTheChosenNumberOfRanks) {
  const json results =
      measure("--scenario decode --strategy alltoall --communicator threads --ranks 3");
  EXPECT_EQ(results.at(0).at("ranks"), 3);
}

TEST(Bench, StartsMpiRanksByItself) {
  if (!mpi_is_built() || std::system("command -v mpirun > /dev/null") != 0) {
    GTEST_SKIP() << "no MPI, or no mpirun";
  }
  const json results =
      measure("--scenario decode --strategy direct,anchor-mpi-pack --communicator mpi --ranks 2");
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results.at(0).at("communicator"), "mpi");
  EXPECT_EQ(results.at(0).at("ranks"), 2);
  EXPECT_EQ(results.at(1).at("strategy"), "anchor-mpi-pack");
}

TEST(Bench, MeasuresTheRendezvousAlone) {
  const std::string mpi = mpi_is_built() ? ",mpi" : "";
  if (!mpi.empty() && std::system("command -v mpirun > /dev/null") != 0) {
    GTEST_SKIP() << "no mpirun";
  }
  const json results = measure("--scenario agree --ranks 2 --communicator threads" + mpi);
  ASSERT_EQ(results.size(), mpi.empty() ? 1U : 2U);
  for (const json& result : results) {
    EXPECT_EQ(result.at("strategy"), "none");
    EXPECT_GT(result.at("steps").at("agree").at("median_us"), 0.0);
  }
}

TEST(Bench, SaysInJsonWhyItFailed) {
  const std::string line = "bench --scenario cpu-large --ranks 1000 --communicator threads";
  const CommandResult in_json = run_command(line + " --json");
  EXPECT_EQ(in_json.status, 1);
  EXPECT_THAT(json::parse(in_json.out).at("error").get<std::string>(), HasSubstr("GiB on 1000"));
  EXPECT_EQ(in_json.err, "");
  const CommandResult in_words = run_command(line);
  EXPECT_EQ(in_words.status, 1);
  EXPECT_THAT(in_words.err, HasSubstr("GiB on 1000"));
}

TEST(Bench, NeedsAGpuForItsScenarios) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  for (const char* scenario : {"h200-decode", "layer-qwen3", "grouped-gptoss-skewed"}) {
    const CommandResult result =
        run_command(std::string("bench --device cuda --json --scenario ") + scenario);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(json::parse(result.out).at("error").get<std::string>(),
                HasSubstr(std::string(scenario) + " needs a GPU: "));
  }
}

TEST(Bench, ReportsWhatItDoesNotKnow) {
  expect_bad_arguments({
      {"bench --scenario cpu-huge", "scenario must be one of"},
      {"bench --strategy teleport", "strategy must be one of"},
      {"bench --communicator pigeons", "communicator must be one of"},
      {"bench --ranks-per-node -1", "--ranks-per-node must be from 0 to 1024, got -1"},
      {"bench --scenario decode --max-sms 8", "no selected scenario runs on one"},
      {"bench --device cuda --communicator sockets", "are threads of one process"},
      {"bench --max-in-flight 1", "--max-in-flight must be at least 2, got 1"},
  });
}

}  // namespace
}  // namespace crossdock::cli
