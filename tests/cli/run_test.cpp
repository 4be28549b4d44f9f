#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/extend/strategy_list.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr const char* kSmall =
    "run --width 24 --inner 16 --experts 10 --top-k 3 --tokens-total 53 --steps 1 --json ";

nlohmann::json run_json(const std::string& arguments) {
  const CommandResult result = run_command(arguments);
  EXPECT_EQ(result.status, 0) << arguments << "\n" << result.out << result.err;
  return nlohmann::json::parse(result.out, nullptr, false);
}

TEST(Run, PrintsTheSameChecksumForAnyNumberOfRanks) {
  const nlohmann::json alone = run_json(std::string(kSmall) + "--ranks 1");
  for (const char* ranks : {"--ranks 4", "--ranks 7"}) {
    for (const std::string& strategy : strategy_names()) {
      const nlohmann::json json =
          run_json(kSmall + std::string(ranks) + " --ranks-per-node 2 --strategy " + strategy);
      EXPECT_EQ(json["checksum"], alone["checksum"]) << ranks << ", " << strategy;
      EXPECT_EQ(json["grad_checksum"], alone["grad_checksum"]) << ranks << ", " << strategy;
    }
  }
  const nlohmann::json other = run_json(std::string(kSmall) + "--ranks 1 --seed 2");
  EXPECT_NE(other["checksum"], alone["checksum"]);
}

TEST(Run, PrintsTheSameChecksumWithOverlap) {
  const nlohmann::json plain = run_json(std::string(kSmall) + "--ranks 3");
  EXPECT_EQ(plain["overlap"], 1);
  for (const std::string& strategy : strategy_names()) {
    const nlohmann::json json =
        run_json(std::string(kSmall) + "--ranks 3 --overlap 2 --strategy " + strategy);
    EXPECT_EQ(json["overlap"], 2);
    EXPECT_EQ(json["checksum"], plain["checksum"]) << strategy;
    EXPECT_EQ(json["grad_checksum"], plain["grad_checksum"]) << strategy;
    EXPECT_EQ(json["check"]["passed"], true) << strategy;
  }
  const CommandResult refused = run_command(std::string(kSmall) + "--overlap 0");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.out, HasSubstr("--overlap must be at least 1, got 0"));  // as JSON
}

TEST(Run, PrintsTheSameChecksumUnderMpirunWithoutFurtherFlags) {
  const std::string mpirun = CROSSDOCK_MPIRUN;
  if (mpirun.empty()) GTEST_SKIP() << "MPI is not in this build";
  const nlohmann::json alone = run_json(std::string(kSmall) + "--ranks 1");
  const CommandResult result = run_program(
      mpirun + " --allow-run-as-root --oversubscribe --mca btl_tcp_if_include lo -np 4 " +
      CROSSDOCK_COMMAND + " " + kSmall);
  EXPECT_EQ(result.status, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["communicator"], "mpi");
  EXPECT_EQ(json["ranks"], 4);
  EXPECT_EQ(json["checksum"], alone["checksum"]);
  EXPECT_EQ(json["grad_checksum"], alone["grad_checksum"]);
}

TEST(Run, StartsMpiRanksItself) {
  if (std::string(CROSSDOCK_MPIRUN).empty()) GTEST_SKIP() << "MPI is not in this build";
  const nlohmann::json json = run_json(std::string(kSmall) + "--communicator mpi --ranks 3");
  EXPECT_EQ(json["communicator"], "mpi");
  EXPECT_EQ(json["ranks"], 3);
  EXPECT_EQ(json["checksum"], run_json(std::string(kSmall) + "--ranks 1")["checksum"]);
}

TEST(Run, SaysThatMpirunIsMissing) {
  if (std::string(CROSSDOCK_MPIRUN).empty()) GTEST_SKIP() << "MPI is not in this build";
  const CommandResult result =
      run_program("PATH=/nowhere " CROSSDOCK_COMMAND " run --communicator mpi");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              HasSubstr("communicator mpi needs mpirun, and there is none on the PATH"));
}

TEST(Run, RefusesALayerThatNoMachineHolds) {
  for (const char* size : {"--width 9223372036854775807", "--experts 1000000000 --top-k 2",
                           "--tokens 2147483648", "--communicator mpi --inner 4000000000000"}) {
    const CommandResult result = run_command(std::string("run ") + size);
    EXPECT_EQ(result.status, 1) << size;
    EXPECT_THAT(result.err, HasSubstr("this layer needs ")) << size;
    EXPECT_THAT(result.err, HasSubstr(" GiB left")) << size;
  }
}

TEST(Run, ReportsTimesBytesAndLoad) {
  const nlohmann::json json = run_json(
      "run --width 24 --inner 16 --experts 10 --top-k 3 --tokens-total 53 --steps 2 --json "
      "--ranks 3");
  EXPECT_EQ(json["ranks"], 3);
  EXPECT_EQ(json["tokens_total"], 53);
  EXPECT_EQ(json["steps_us"].size(), 2);
  EXPECT_GT(json["forward_us"], 0);
  EXPECT_GT(json["backward_us"], 0);
  std::vector<std::string> names;
  for (const auto& operation : json["operations"]) {
    EXPECT_GE(operation["median_us"], 0);
    EXPECT_GE(operation["share"], 0);
    names.push_back(operation["name"]);
  }
  EXPECT_THAT(names, testing::IsSupersetOf({"router", "plan", "dispatch", "experts", "combine",
                                            "dispatch_grad", "experts_dx", "experts_dw"}));
  int64_t rows = 0;
  for (const auto& count : json["load"]["rows_per_rank"]) rows += count.get<int64_t>();
  EXPECT_EQ(rows, 53 * 3);
  EXPECT_EQ(json["load"]["rows_per_expert"].size(), 10);
  EXPECT_EQ(json["check"]["passed"], true);
  EXPECT_EQ(json["check"]["tokens"], 53);
  EXPECT_EQ(json["check"]["largest_error_unit"], "fraction of the tolerance");
  EXPECT_EQ(json["check"]["experts"], 3);
  EXPECT_EQ(json["checksum"].get<std::string>().size(), 16);
}

TEST(Run, ComparesMemoryWithAPlanOfForwardAndBackwardOnlyAfterBoth) {
  const nlohmann::json json = run_json(
      "run --width 16 --inner 4 --experts 4 --top-k 2 --tokens 20 --steps 1 --json "
      "--forward-only");
  EXPECT_TRUE(json["memory"].contains("pool_bytes"));
  EXPECT_FALSE(json["memory"].contains("planned_bytes"));
}

TEST(Run, HoldsWithinTenPercentOfWhatWasPlanned) {
  for (const char* nodes : {"", " --ranks-per-node 2"}) {
    for (const std::string& strategy : strategy_names()) {
      const nlohmann::json json = run_json(
          "run --width 64 --inner 4 --experts 16 --top-k 2 --tokens 2000 --steps 4 --no-check "
          "--json --ranks 4 --strategy " +
          strategy + nodes);
      const nlohmann::json& memory = json["memory"];
      const double held = memory["window_bytes"].get<double>() + memory["pool_bytes"].get<double>();
      EXPECT_NEAR(held / memory["planned_bytes"].get<double>(), 1.0, 0.1) << strategy << nodes;
    }
  }
}

TEST(Run, ChecksEveryPresetAndDtype) {
  for (const char* preset : {"qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "mixtral-8x7b"}) {
    const nlohmann::json json = run_json(
        "run --steps 1 --tokens 9 --ranks 2 --json --scale 32 --preset " + std::string(preset));
    EXPECT_EQ(json["preset"], preset);
    EXPECT_THAT(json["scaling"].get<std::string>(), HasSubstr("divided by 32"));
    EXPECT_EQ(json["check"]["passed"], true) << json;
  }
  for (const char* dtype : {"fp64", "bf16", "fp16"}) {
    const nlohmann::json json =
        run_json(std::string(kSmall) + "--weights-in experts --shared-inner 8 --dtype " + dtype);
    EXPECT_EQ(json["dtype"], dtype);
    EXPECT_EQ(json["check"]["passed"], true) << json;
  }
}

TEST(Run, HandlesFewerTokensThanRanksAndNone) {
  EXPECT_EQ(run_json("run --tokens-total 2 --ranks 5 --steps 1 --json")["check"]["tokens"], 2);
  EXPECT_EQ(run_json("run --tokens 0 --steps 1 --json")["check"]["passed"], true);
  const nlohmann::json few =
      run_json("run --experts 2 --top-k 1 --ranks 4 --tokens 8 --steps 1 --json");
  EXPECT_EQ(few["check"]["experts"], 2);
}

TEST(Run, PrintsATableWithoutColoursToAFile) {
  const CommandResult result =
      run_program("env LC_ALL=C.UTF-8 " CROSSDOCK_COMMAND
                  " run --preset deepseek-v3 --scale 64 --tokens 16 --steps 1");
  EXPECT_EQ(result.status, 0);
  for (const char* word : {"deepseek-v3", "divided by 64", "dispatch", "rows per rank", "█",
                           "rows per expert", "passed", "checksum"}) {
    EXPECT_THAT(result.out, HasSubstr(word));
  }
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(result.err, IsEmpty());
}

TEST(Run, RunsForwardAloneAndWithoutCheck) {
  const nlohmann::json json = run_json(std::string(kSmall) + "--forward-only --no-check");
  EXPECT_EQ(json["check"], nullptr);
  EXPECT_FALSE(json.contains("grad_checksum"));
  EXPECT_EQ(json["backward"], false);
  EXPECT_EQ(json["checksum"], run_json(kSmall)["checksum"]);
}

TEST(Run, SaysWhereItsResultsComeFrom) {
  const nlohmann::json json = run_json(std::string(kSmall) + "--ranks 2");
  EXPECT_EQ(json["schema"], 1);
  EXPECT_THAT(json["version"].get<std::string>(),
              testing::StartsWith(std::string(describe_build().version)));
  EXPECT_EQ(json["command"], std::string("crossdock ") + kSmall + "--ranks 2");
  for (const char* key : {"build", "host"}) {
    EXPECT_THAT(json[key].get<std::string>(), Not(IsEmpty())) << key;
  }
  EXPECT_THAT(json["time"].get<std::string>(), testing::ContainsRegex("^20[0-9-]+T[0-9:]+[+-]"));
}

TEST(Run, HasTheTimesOfEveryRankAndTheRowsBetweenThem) {
  const nlohmann::json json = run_json(std::string(kSmall) + "--ranks 3");
  ASSERT_EQ(json["ranks_us"].size(), 3U);
  double slowest = 0;
  for (const auto& rank : json["ranks_us"]) {
    EXPECT_GT(rank["backward"], 0);
    slowest = std::max(slowest, rank["forward"].get<double>());
  }
  EXPECT_NEAR(slowest, json["forward_us"].get<double>(), 0.01 * slowest);  // sent with 6 digits
  const auto& rows = json["load"]["rows_from_to"];
  ASSERT_EQ(rows.size(), 3U);
  std::vector<int64_t> sent_by_rank;
  for (size_t to = 0; to < 3; ++to) {
    int64_t received = 0;
    int64_t sent = 0;
    for (size_t other = 0; other < 3; ++other) {
      received += rows[other][to].get<int64_t>();
      sent += rows[to][other].get<int64_t>();
    }
    EXPECT_EQ(received, json["load"]["rows_per_rank"][to]);
    sent_by_rank.push_back(sent);
  }
  EXPECT_THAT(sent_by_rank, testing::UnorderedElementsAre(51, 54, 54));  // 53 tokens, 3 routes each
}

TEST(Run, SaysWhyItHasNoGpu) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  for (const char* communicator : {"threads", "sockets"}) {
    const CommandResult result =
        run_command(std::string("run --device cuda --communicator ") + communicator);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.err, HasSubstr("--device cuda needs a GPU: "));
    EXPECT_THAT(result.out, IsEmpty());
    const auto features = describe_build().features;
    const auto cuda = std::ranges::find(features, std::string_view("cuda"), &Feature::name);
    EXPECT_THAT(run_program("env COLUMNS=1000 " CROSSDOCK_COMMAND " run --device cuda").err,
                HasSubstr(cuda->is_built ? "nvidia-smi"
                                         : "CROSSDOCK_CUDA=on pip install ., a wheel of make "
                                           "wheels, or cmake -DCROSSDOCK_WITH_CUDA=ON"));
  }
  const CommandResult in_json = run_command("run --device cuda --json");
  EXPECT_EQ(in_json.status, 1);
  EXPECT_THAT(nlohmann::json::parse(in_json.out)["error"].get<std::string>(),
              HasSubstr("--device cuda needs a GPU: "));
  EXPECT_THAT(in_json.err, IsEmpty());
}

TEST(Run, RejectsBadArgumentsWithStatusTwo) {
  expect_bad_arguments({
      {"run --preset gpt-5", "gpt-5"},
      {"run --preset mixtral-8x7b --scale 5", "--scale must divide the widths of mixtral-8x7b"},
      {"run --scale 2", "--scale needs --preset"},
      {"run --tokens 4 --tokens-total 5", "not both"},
      {"run --tokens -1", "tokens must be from 0 to 2147483648, got -1"},
      {"run --tokens 9223372036854775807", "tokens must be from 0 to 2147483648"},
      {"run --experts 2 --top-k 3", "--experts (2) must be at least --top-k (3)"},
      {"run --width 0", "--width must be at least 1, got 0"},
      {"run --strategy teleport",
       "--strategy must be one of allgather, alltoall, direct, hierarchical, auto; got "
       "\"teleport\""},
      {"run --dtype fp8_e4m3", "fp8_e4m3"},
      {"run --ranks 0", "--ranks must be from 1 to 1024, got 0"},
      {"run --ranks 100000", "--ranks must be from 1 to 1024, got 100000"},
      {"run --steps 0", "--steps must be at least 1"},
      {"run --communicator mpi --max-in-flight 1", "--max-in-flight must be at least 2"},
      {"run --max-in-flight 3", "--max-in-flight and --chunk-bytes need --communicator mpi"},
      {"run --chunk-bytes 0", "--chunk-bytes must be at least 1, got 0"},
      {"run --width many", "--width must be a whole number, got \"many\""},
      {"run --tokens 99999999999999999999", "got 99999999999999999999"},
      {"run --seed -1", "--seed must be at least 0, got -1"},
      {"run --preset", "--preset needs a value"},
      {"run --device tpu", "tpu"},
      {"run --device cuda --dtype fp64", "--device cuda has no fp64"},
      {"run --overlap-sms 8", "--overlap-sms needs --device cuda"},
      {"run --device cuda --overlap-sms -1", "--overlap-sms must be at least 0, got -1"},
  });
}

}  // namespace
}  // namespace crossdock::cli
