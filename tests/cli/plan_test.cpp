#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/command.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

const char* const kQwen =
    "plan --model qwen3-30b-a3b --seq 8192 --micro-batch 8 --nodes 2 --ranks-per-node 8";

json plan_json(const std::string& arguments) {
  const CommandResult result = run_command(arguments + " --json");
  EXPECT_EQ(result.status, 0) << result.err;
  return json::parse(result.out);
}

TEST(Plan, ShowsTokensQueueEntriesAndTheChoice) {
  const CommandResult result = run_command(std::string(kQwen) + " --queue");
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.err, IsEmpty());
  for (const char* text :
       {"65536 tokens per rank", "send queue of at most 65535 entries", "largest N",
        "3N+1 dispatch   196609  does not fit      21844           21824",
        "at most 128 requests in flight", "strategy: hierarchical"}) {
    EXPECT_THAT(result.out, HasSubstr(text));
  }
  for (const char* name : {"allgather", "alltoall", "direct", "hierarchical"}) {
    EXPECT_THAT(result.out, HasSubstr(name));
  }
}

TEST(Plan, BeginsWithTheVerdict) {
  const std::string text = run_command(kQwen).out;
  EXPECT_TRUE(text.starts_with("strategy: hierarchical\n")) << text;
  const std::string wide = "env COLUMNS=200 " CROSSDOCK_COMMAND " ";
  EXPECT_THAT(run_program(wide + kQwen).out,
              ContainsRegex("a step needs at least [0-9.]+ m?s and [0-9.]+ GB of a rank's 80.0 GB; "
                            "with the worst routes [0-9.]+ GB"));
  EXPECT_THAT(text, Not(HasSubstr("3N+1")));  // other schemes: only with --queue
  EXPECT_THAT(run_program(wide + kQwen + " --memory 8").out,
              HasSubstr(" GB, which does not fit\n"));
  EXPECT_THAT(run_command(std::string(kQwen) + " --memory 1").err, HasSubstr("more than the 1 GB"));
}

TEST(Plan, KnowsTheFabricsOfOtherGpus) {
  const std::string job = "plan --model mixtral-8x7b --tokens 64 --fabric ";
  EXPECT_EQ(plan_json(job + "a100-nvlink-200g")["fabric"]["memory_bytes"], 80'000'000'000);
  EXPECT_EQ(plan_json(job + "b200-nvlink-400g")["fabric"]["within_node_rate"], 900e9);
  EXPECT_EQ(plan_json(job + "gb200 --memory 96.5")["fabric"]["memory_bytes"], 96'500'000'000);
  expect_bad_arguments({{job + "gb200 --memory -1", "--memory must be a positive number of GB"}});
}

TEST(Plan, TakesTheConfigurationOfAModel) {
  const std::string folder = testing::TempDir() + "crossdock_config_" + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  const auto plan_of = [&](const std::string& config) {
    std::ofstream(folder + "/config.json") << config;
    return run_command("plan --tokens 64 --json --config " + folder);
  };
  const json deepseek = json::parse(
      plan_of(R"({"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
                  "moe_intermediate_size": 2048, "n_routed_experts": 256,
                  "num_experts_per_tok": 8})")
          .out)["job"];
  EXPECT_EQ(deepseek["model"], "deepseek_v3");
  EXPECT_EQ(deepseek["width"], 7168);
  EXPECT_EQ(deepseek["inner"], 2048);
  EXPECT_EQ(deepseek["experts"], 256);
  EXPECT_EQ(deepseek["top_k"], 8);
  const json mixtral =
      json::parse(plan_of(R"({"text_config": {"hidden_size": 4096, "intermediate_size": 14336,
                  "num_local_experts": 8, "num_experts_per_tok": 2}})")
                      .out)["job"];
  EXPECT_EQ(mixtral["inner"], 14336);
  EXPECT_EQ(mixtral["experts"], 8);
  const CommandResult dense = plan_of(R"({"hidden_size": 4096, "intermediate_size": 14336})");
  EXPECT_EQ(dense.status, 1);
  EXPECT_THAT(dense.out, HasSubstr("must have one of the keys num_experts, n_routed_experts"));
  EXPECT_THAT(plan_of("[]").out, HasSubstr("must be a JSON object"));
  EXPECT_THAT(plan_of(R"({"hidden_size": "wide"})").out,
              HasSubstr("hidden_size must be a positive integer"));
  EXPECT_THAT(plan_of("{").out, HasSubstr("not JSON"));
  const std::string deep = std::string(300'000, '[') + std::string(300'000, ']');
  const std::string deep_size = R"({"hidden_size": )" + deep + "}";
  for (const std::string& config : {deep, deep_size}) {
    const CommandResult refused = plan_of(config);
    EXPECT_EQ(refused.status, 1);
    EXPECT_THAT(refused.out, HasSubstr("must nest at most 64 deep"));
  }
  std::filesystem::remove_all(folder);
  EXPECT_THAT(run_command("plan --tokens 64 --config " + folder).err, HasSubstr("cannot read"));
}

TEST(Plan, PrintsJson) {
  const json plan = plan_json(std::string(kQwen) + " --capacity 1.25");
  EXPECT_EQ(plan["job"]["tokens_per_rank"], 65536);
  EXPECT_EQ(plan["job"]["group_ranks"], 16);
  EXPECT_EQ(plan["fabric"]["name"], "h100-nvlink-400g");
  EXPECT_EQ(plan["send_queue"]["depth"], 65535);
  EXPECT_EQ(plan["send_queue"]["dispatch_3n_plus_1"]["entries"], 196609);
  EXPECT_EQ(plan["send_queue"]["dispatch_3n_plus_1"]["largest_tokens"], 21844);
  EXPECT_EQ(plan["send_queue"]["dispatch_3n_plus_1"]["largest_rounded_tokens"], 21824);
  EXPECT_EQ(plan["send_queue"]["dispatch_3n_plus_1"]["fits"], false);
  EXPECT_EQ(plan["send_queue"]["max_in_flight"], 128);
  EXPECT_EQ(plan["strategy"], "hierarchical");
  EXPECT_THAT(plan["reason"].get<std::string>(), HasSubstr("rows per token"));
  ASSERT_EQ(plan["strategies"].size(), 4);
  for (const json& strategy : plan["strategies"]) {
    for (const char* operation : {"dispatch", "combine", "partial_sums"}) {
      const json& cost = strategy[operation];
      EXPECT_GT(cost["rows"]["within_node"], 0) << strategy["name"] << operation;
      EXPECT_GT(cost["bytes"]["between_nodes"], 0) << strategy["name"] << operation;
      EXPECT_GT(cost["lower_bound_s"], 0) << strategy["name"] << operation;
    }
    EXPECT_LE(strategy["max_in_flight"], 128);
    const json& memory = strategy["memory"];
    EXPECT_LT(memory["expected"]["total_bytes"], memory["with_capacity"]["total_bytes"]);
    EXPECT_LT(memory["with_capacity"]["total_bytes"], memory["worst_case"]["total_bytes"]);
  }
}

TEST(Plan, TakesTheTypeOfPartialSums) {
  const std::string arguments = "plan --model deepseek-v3 --tokens 4096 --nodes 2";
  EXPECT_EQ(plan_json(arguments)["job"]["partial_sums"], false);
  const json alone = plan_json(arguments + " --partial-sums");
  const json fp32 = plan_json(arguments + " --partial-sums fp32");
  const json rows = plan_json(arguments + " --partial-sums=rows");
  EXPECT_EQ(alone, fp32);
  EXPECT_EQ(fp32["job"]["partial_sums"], "fp32");
  EXPECT_EQ(rows["job"]["partial_sums"], "rows");
  const auto bytes = [](const json& plan) {
    return plan["strategies"][3]["partial_sums"]["bytes"]["between_nodes"].get<double>();
  };
  EXPECT_EQ(bytes(fp32), 2 * bytes(rows));
  EXPECT_THAT(run_command(arguments + " --partial-sums rows").out, HasSubstr("partial, bf16"));
  const CommandResult wrong = run_command(arguments + " --partial-sums bf16");
  EXPECT_NE(wrong.status, 0);
  EXPECT_THAT(wrong.err, HasSubstr("must be one of fp32, rows; got \"bf16\""));
}

TEST(Plan, SendsOneCopyPerRankWhereTheLinkIsSlowerThanMemory) {
  const std::string arguments = "plan --model deepseek-v3 --tokens 4096 --nodes 1";
  const auto rows = [](const json& plan) {
    return plan["strategies"][2]["dispatch"]["rows"]["within_node"].get<double>() / 4096;
  };
  const json chosen = plan_json(arguments);
  EXPECT_EQ(chosen["job"]["copies"], "auto");
  EXPECT_NEAR(rows(chosen), 4.633, 0.001);
  EXPECT_NEAR(rows(plan_json(arguments + " --copies per_rank")), 4.633, 0.001);
  EXPECT_NEAR(rows(plan_json(arguments + " --copies per_route")), 7, 0.001);
  EXPECT_NEAR(rows(plan_json(arguments + " --within-rate 4000")), 7, 0.001);
}

TEST(Plan, FlagsMemoryBeyondThatOfTheFabric) {
  const std::string arguments = "plan --model qwen3-30b-a3b --tokens 65536 --nodes 2";
  EXPECT_THAT(run_command(arguments).out,
              HasSubstr("! the worst case of allgather, alltoall, direct, hierarchical exceeds the "
                        "80.0\n    GB per rank of h100-nvlink-400g"));
  const json plan = json::parse(run_command(arguments + " --json").out, nullptr, false);
  for (const json& strategy : plan["strategies"]) {
    EXPECT_EQ(strategy["memory"]["expected"]["fits"], true);
    EXPECT_EQ(strategy["memory"]["worst_case"]["fits"], false);
  }
  const std::string small = "plan --model qwen3-30b-a3b --tokens 64 --nodes 2";
  EXPECT_THAT(run_command(small).out, testing::Not(HasSubstr("exceeds")));
}

TEST(Plan, ShowsWhatACapacityDrops) {
  const std::string arguments = "plan --model qwen3-30b-a3b --tokens 4096 --nodes 2 --capacity 1.0";
  const CommandResult result = run_command(arguments);
  EXPECT_THAT(result.out,
              HasSubstr("capacity 1.00: at most 256 rows from a rank to an expert; about 2.4"));
  EXPECT_THAT(result.out, HasSubstr("routes are dropped"));
  const json plan = plan_json(arguments);
  EXPECT_EQ(plan["job"]["capacity_rows"], 256);
  EXPECT_NEAR(plan["routing"]["dropped_share"].get<double>(), 0.0242, 0.0005);
}

TEST(Plan, ShowsTheBusiestRankWhereRanksDiffer) {
  const std::string title = "most bytes that a rank sends or receives";
  const std::string arguments = "plan --model qwen3-30b-a3b --tokens 4096 --nodes 2";
  EXPECT_THAT(run_command(arguments).out, testing::Not(HasSubstr(title)));
  const CommandResult skewed = run_command(arguments + " --zipf 1");
  EXPECT_THAT(skewed.out, HasSubstr(title));
  EXPECT_THAT(skewed.out, HasSubstr("experts skewed by 1.00"));
}

TEST(Plan, SizesFabricAndMeshCanBeGiven) {
  const json plan = plan_json(
      "plan --width 512 --experts 24 --top-k 3 --tokens 1000 --nodes 4 --ranks-per-node 2 --ep 4 "
      "--fabric ethernet --between-rate 12.5 --queue-depth 4096 --max-in-flight 16 --dtype fp32");
  EXPECT_EQ(plan["job"]["ranks"], 8);
  EXPECT_EQ(plan["job"]["group_ranks"], 4);
  EXPECT_EQ(plan["job"]["group_nodes"], 2);
  EXPECT_EQ(plan["fabric"]["between_nodes_rate"], 12.5e9);
  EXPECT_EQ(plan["send_queue"]["dispatch_3n_plus_1"]["largest_tokens"], 1365);
  const json& alltoall = plan["strategies"][1]["dispatch"];
  EXPECT_NEAR(alltoall["rows"]["between_nodes"].get<double>(), 1500, 1e-6);
  EXPECT_NEAR(alltoall["bytes"]["between_nodes"].get<double>(), 1500 * 512 * 4, 1e-3);
}

TEST(Plan, AnImpossibleJobNamesTheLimitAndTheLargestLegalValue) {
  const std::string arguments = std::string(kQwen) + " --max-in-flight 70000";
  const CommandResult result = run_command(arguments);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, IsEmpty());
  EXPECT_THAT(result.err, HasSubstr("max_in_flight is 70000"));
  EXPECT_THAT(result.err, HasSubstr("the largest max_in_flight is 65535"));
  const CommandResult as_json = run_command(arguments + " --json");
  EXPECT_EQ(as_json.status, 1);
  EXPECT_THAT(json::parse(as_json.out)["error"].get<std::string>(), HasSubstr("65535"));
}

TEST(Plan, RejectsBadArgumentsWithStatusTwo) {
  expect_bad_arguments({
      {"plan --tokens 5", "--model"},
      {"plan --model qwen3-30b-a3b", "--seq"},
      {"plan --model qwen3-30b-a3b --seq 5 --tokens 5", "not both"},
      {"plan --model teleport --seq 5", "teleport"},
      {"plan --model qwen3-30b-a3b --seq 5 --fabric string", "string"},
      {"plan --model qwen3-30b-a3b --seq five", "--seq must be a whole number, got \"five\""},
      {"plan --model qwen3-30b-a3b --seq -4", "--seq must be at least 1, got -4"},
      {"plan --model qwen3-30b-a3b --seq 5 --nodes 0", "--nodes must be at least 1, got 0"},
      {"plan --model qwen3-30b-a3b --seq 5 --zipf much", "--zipf must be a number, got \"much\""},
  });
}

// A running layer uses the memory that the planner predicts; its routes are nearly even.
TEST(Plan, MemoryOfARunIsWithinTenPercentOfThePlan) {
  for (const char* strategy : {"allgather", "alltoall", "direct", "hierarchical", "auto"}) {
    const CommandResult result = run_command(
        "run --ranks 4 --ranks-per-node 2 --tokens 1024 --width 128 --inner 16 --experts 64 "
        "--top-k 8 --no-check --json --strategy " +
        std::string(strategy));
    ASSERT_EQ(result.status, 0) << result.err;
    const json run = json::parse(result.out);
    const double held =
        run["memory"]["window_bytes"].get<double>() + run["memory"]["pool_bytes"].get<double>();
    EXPECT_NEAR(held / run["memory"]["planned_bytes"].get<double>(), 1.0, 0.1) << strategy;
    EXPECT_EQ(run["strategy"], strategy == std::string("auto") ? "hierarchical" : strategy);
    EXPECT_EQ(run["auto"], strategy == std::string("auto"));
  }
}

}  // namespace
}  // namespace crossdock::cli
