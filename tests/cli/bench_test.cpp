#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "cli/command.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::Contains;
using testing::ContainsRegex;
using testing::ElementsAre;
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

// A scenario takes a line for its purpose and one for its sizes.
TEST(Bench, ListsFitEightyColumns) {
  const std::string list = run_program("env COLUMNS=80 " CROSSDOCK_COMMAND " bench --list").out;
  const auto num_scenarios = std::ssize(json::parse(run_command("bench --list --json").out));
  EXPECT_LE(std::ranges::count(list, '\n'), 2 * num_scenarios + 12) << list;
  EXPECT_THAT(list, HasSubstr("narrow rows, number of ranks varies, 65536 tokens in total\n"));
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

// The output for two numbers of tokens and two widths, in this format.
std::string sweep_as(const std::string& format) {
  const CommandResult result = run_command(
      "bench --tokens 8:16:x2 --width 24,40 --experts 6 --top-k 2 --ranks 2 --dtype bf16 "
      "--strategy direct --communicator threads --repeat 3 --warm-up 1 --format " +
      format);
  EXPECT_EQ(result.status, 0) << result.err;
  return result.out;
}

TEST(BenchSweep, PrintsOneLineOfCsvPerStep) {
  std::vector<std::string> comments;
  std::vector<std::vector<std::string>> lines;
  std::istringstream text(sweep_as("csv"));
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with('#')) {
      comments.push_back(line);
      continue;
    }
    std::istringstream cells(line + ",");
    lines.emplace_back();
    for (std::string cell; std::getline(cells, cell, ',');) lines.back().push_back(cell);
  }
  for (const char* words : {"# crossdock: ", "# host: ", "# time: 20", "# samples: 3 per step",
                            "# command: crossdock bench --tokens 8:16:x2 --width 24,40 "}) {
    EXPECT_THAT(comments, Contains(HasSubstr(words)));
  }
  ASSERT_EQ(lines.size(), 1U + 4 * 3);
  const auto value = [&](size_t line, const char* title) {
    const auto column = std::ranges::find(lines[0], title) - lines[0].begin();
    return lines.at(line).at(static_cast<size_t>(column));
  };
  std::vector<std::string> order;
  for (size_t i = 1; i < lines.size(); ++i) {
    ASSERT_EQ(lines[i].size(), lines[0].size());
    order.push_back(value(i, "width") + " " + value(i, "tokens") + " " + value(i, "step"));
    EXPECT_EQ(value(i, "communicator") + value(i, "strategy"), "threadsdirect");
    EXPECT_EQ(value(i, "samples"), "3");
    const double median = std::stod(value(i, "median_us"));
    EXPECT_GT(median, 0.0);
    EXPECT_LE(std::stod(value(i, "min_us")), std::stod(value(i, "p10_us")));
    EXPECT_LE(std::stod(value(i, "p10_us")), median);
    EXPECT_LE(median, std::stod(value(i, "p90_us")));
    EXPECT_LE(std::stod(value(i, "p90_us")), std::stod(value(i, "max_us")));
    const double rate = std::stod(value(i, "bytes")) / median * 1e-3;
    EXPECT_NEAR(std::stod(value(i, "gb_per_s")), rate, 1e-3 + 1e-3 * rate);
    EXPECT_GT(std::stod(value(i, "ratio")), 0.0);
  }
  EXPECT_THAT(order, ElementsAre("24 8 plan", "24 8 dispatch", "24 8 combine", "24 16 plan",
                                 "24 16 dispatch", "24 16 combine", "40 8 plan", "40 8 dispatch",
                                 "40 8 combine", "40 16 plan", "40 16 dispatch", "40 16 combine"));
  EXPECT_EQ(value(12, "bytes"), std::to_string((16 * 40 + 16 * 2 * 40) * 2 * 2));
}

TEST(BenchSweep, PrintsOneLineOfMarkdownPerSize) {
  const std::string text = sweep_as("markdown");
  for (const char* words :
       {"- crossdock: ", "- command: `crossdock bench ",
        "### custom, direct, threads: P2 K2 E6 bf16",
        "Median us (x copy):", "| width | tokens | `plan` | `dispatch` | `combine` |",
        "|---|---|---:|---:|---:|", "\n| 24 | 8 | ", "\n| 24 | 16 | ", "\n| 40 | 8 | "}) {
    EXPECT_THAT(text, HasSubstr(words));
  }
}

TEST(BenchSweep, PrintsJsonThatDescribesTheRun) {
  const json document = json::parse(sweep_as("json"));
  const json& run = document.at("run");
  for (const char* name : {"version", "build", "host", "cores", "time", "command"}) {
    EXPECT_TRUE(run.contains(name)) << name;
  }
  EXPECT_EQ(run.at("samples"), 3);
  EXPECT_EQ(run.at("checked"), true);
  const json& results = document.at("results");
  ASSERT_EQ(results.size(), 4U);
  EXPECT_EQ(results.at(1).at("tokens"), 16);
  EXPECT_EQ(results.at(1).at("width"), 24);
  EXPECT_EQ(results.at(2).at("width"), 40);
  EXPECT_EQ(results.at(2).at("dtype"), "bf16");
  EXPECT_LE(results.at(0).at("steps").at("plan").at("p10_us"),
            results.at(0).at("steps").at("plan").at("p90_us"));
}

TEST(BenchSweep, PrintsATableWithOneLinePerSize) {
  const std::string text = sweep_as("table");
  EXPECT_THAT(text, HasSubstr("custom, direct, threads: P2 K2 E6 bf16; median us (x copy)\n"));
  EXPECT_THAT(text, ContainsRegex("width +tokens +plan +dispatch +combine\n"));
  EXPECT_THAT(text, ContainsRegex("\n +40 +16 +[0-9.]+ \\([0-9.]+\\)"));
}

TEST(BenchSweep, PrintsStepsOfASingleSizeInMarkdown) {
  const CommandResult result = run_command(
      "bench --scenario decode --tokens 4 --strategy direct --communicator threads --repeat 1 "
      "--format markdown");
  EXPECT_THAT(result.out, HasSubstr("### decode, direct, threads: P4 T4 D2048 K8 E64 fp32"));
  EXPECT_THAT(result.out,
              HasSubstr("| step | median us | min | p10 | p90 | max | GB/s | x copy |"));
  EXPECT_THAT(result.out, HasSubstr("\n| `dispatch` | "));
}

TEST(BenchSweep, RunsProcessesAtEverySize) {
  const std::string line = "--tokens 4,8 --width 16 --ranks 2,3 --strategy direct --communicator ";
  const json results = measure(line + "sockets --dtype fp16");
  ASSERT_EQ(results.size(), 4U);
  EXPECT_EQ(results.at(1).at("tokens"), 8);
  EXPECT_EQ(results.at(1).at("ranks"), 2);
  EXPECT_EQ(results.at(2).at("ranks"), 3);
  EXPECT_EQ(results.at(2).at("dtype"), "fp16");
  EXPECT_EQ(results.at(2).at("communicator"), "sockets");
}

TEST(BenchSweep, ReplacesSizesOfAScenario) {
  const json results =
      measure("--scenario layer --tokens 8 --width 32 --strategy direct --communicator threads");
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results.at(0).at("scenario"), "layer");
  EXPECT_EQ(results.at(0).at("tokens"), 8);
  EXPECT_EQ(results.at(0).at("width"), 32);
  EXPECT_EQ(results.at(0).at("experts"), 64);
  EXPECT_TRUE(results.at(0).at("steps").contains("backward"));
}

TEST(BenchSweep, RefusesASweepThatMemoryCannotFinish) {
  const CommandResult result = run_command(
      "bench --tokens 8,1000000000 --width 1024 --strategy direct --communicator threads "
      "--format csv");
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr("scenario custom needs"));
}

TEST(BenchSweep, NeedsAGpuForSizesOnOne) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  const CommandResult result =
      run_command("bench --device cuda --tokens 8,16 --width 64 --format json");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(json::parse(result.out).at("error").get<std::string>(),
              HasSubstr("custom-cuda needs a GPU: "));
}

TEST(BenchSweep, RefusesBadSizes) {
  expect_bad_arguments({
      {"bench --tokens many", "--tokens must be a whole number or a range"},
      {"bench --tokens 128:512", "got \"128:512\""},
      {"bench --width 0", "--width must be from 1 to 1073741824, got 0"},
      {"bench --ranks 1025", "--ranks must be from 1 to 1024, got 1025"},
      {"bench --experts 64:8:x2", "the first value of a range must be at most the last"},
      {"bench --top-k 9 --experts 8", "experts (8) must be at least top_k (9)"},
      {"bench --dtype fp8", "--dtype must be one of fp32, bf16, fp16; got \"fp8\""},
      {"bench --tokens 1:2000:+1", "at most 1000 values"},
      {"bench --tokens 1:100:+1 --width 1:100:+1", "more than 1000 combinations"},
      {"bench --scenario agree --tokens 8", "--ranks must be its only size"},
      {"bench --format xml", "--format must be one of table, csv, markdown, json"},
      {"bench --list --format csv", "--format must be table or json, got csv"},
  });
}

TEST(Bench, RefusesScenariosOfTheOtherDevice) {
  expect_bad_arguments({
      {"bench --device cuda --scenario layer-overlap",
       "scenario layer-overlap runs on the CPU, but --device is cuda; give --device cpu"},
      {"bench --device cuda --scenario 'grouped-*,cpu-*'", "scenario cpu-* runs on the CPU"},
      {"bench --scenario h200-decode",
       "scenario h200-decode runs on GPUs, but --device is cpu; give --device cuda"},
      {"bench --device cpu --scenario 'grouped-*'", "scenario grouped-* runs on GPUs"},
  });
}

// layer-overlap is a scenario on the CPU, layer-qwen3 one on GPUs.
TEST(Bench, PatternsSelectScenariosOfTheDevice) {
  const CommandResult on_cpu = run_command(
      "bench --scenario 'layer*' --tokens 8 --width 16 --experts 4 --top-k 2 "
      "--ranks 2 --strategy direct --communicator threads --repeat 1 --warm-up 0 --json");
  EXPECT_EQ(on_cpu.status, 0) << on_cpu.err;
  std::set<std::string> names;
  for (const json& one : json::parse(on_cpu.out)) names.insert(one.at("scenario"));
  EXPECT_THAT(names, testing::ElementsAre("layer", "layer-overlap"));
}

TEST(Bench, ReportsWhatItDoesNotKnow) {
  expect_bad_arguments({
      {"bench --scenario cpu-huge", "scenario must be one of"},
      {"bench --strategy teleport", "strategy must be one of"},
      {"bench --communicator pigeons", "communicator must be one of"},
      {"bench --ranks-per-node -1", "--ranks-per-node must be from 0 to 1024, got -1"},
      {"bench --scenario decode --max-sms 8", "no selected scenario runs on one"},
      {"bench --device cuda --scenario layer-qwen3 --communicator sockets",
       "has one rank, a thread"},
      {"bench --scenario decode --copies per_rank", "no selected scenario runs on one"},
      {"bench --scenario h200-decode --copies one", "must be one of auto, per_route, per_rank"},
      {"bench --max-in-flight 1", "--max-in-flight must be at least 2, got 1"},
  });
}

}  // namespace
}  // namespace crossdock::cli
