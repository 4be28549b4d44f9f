#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "cli/command.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/extend/strategy_list.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

json worked_case() {
  return json::parse(read_project_file("examples/cases/worked.json"));
}

json evaluate(const json& eval_case) {
  const CommandResult result = run_command("eval -", eval_case.dump());
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.err, IsEmpty());
  return json::parse(result.out);
}

void expect_checked(const json& eval_case) {
  const CommandResult result = run_command("eval --check -", eval_case.dump());
  EXPECT_EQ(result.status, 0) << result.err << result.out << eval_case.dump();
  EXPECT_THAT(result.err, StartsWith("checked against the fp64 reference"));
}

// The text of a page's n-th code block of this kind.
std::string fenced_block(const std::string& page, const std::string& kind, int n) {
  size_t at = 0;
  for (int i = 0; i <= n; ++i) at = page.find("```" + kind + "\n", at) + kind.size() + 4;
  return page.substr(at, page.find("```", at) - at);
}

TEST(CaseFormat, ExampleInTheDocsIsWhatTheCommandPrints) {
  const std::string page = read_project_file("docs/case_format.md");
  EXPECT_EQ(fenced_block(page, "json", 0), read_project_file("examples/cases/worked.json"));
  const CommandResult result =
      run_command("eval " + std::string(CROSSDOCK_SOURCE_DIR) + "/examples/cases/worked.json");
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(fenced_block(page, "json", 1), result.out);
}

TEST(Eval, TakesJsonLikeTheOtherCommands) {
  const std::string text = worked_case().dump();
  const CommandResult result = run_command("eval --json -", text);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, run_command("eval -", text).out);
}

TEST(Eval, JudgesEveryCallOfADispatchCase) {
  const std::string file = std::string(CROSSDOCK_SOURCE_DIR) + "/examples/cases/dispatch.json";
  std::set<std::string> checksums;
  for (const char* communicator : {"threads", "sockets"}) {
    const CommandResult result =
        run_command("eval --check --communicator " + std::string(communicator) + " " + file);
    EXPECT_EQ(result.status, 0) << result.out;
    EXPECT_THAT(result.err, HasSubstr("checked against the fp64 reference: dispatch: ranks 2"));
    checksums.insert(json::parse(result.out)["checksum"].get<std::string>());
  }
  EXPECT_EQ(checksums.size(), 1);
}

// Both ranks must throw this error; the group stays usable.
TEST(Eval, ReportsErrorsOfADispatchCaseAsFindings) {
  json eval_case = json::parse(read_project_file("examples/cases/dispatch.json"));
  eval_case["alignment"] = 3;
  const CommandResult result = run_command("eval --check -", eval_case.dump());
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(json::parse(result.out)["findings"][0].get<std::string>(),
              HasSubstr("alignment must be 1, 8"));
  eval_case["alignment"] = 1;
  eval_case["max_rows"] = 100;
  eval_case["placement"] = {0, 65536, 1};
  EXPECT_THAT(run_command("eval -", eval_case.dump()).out,
              HasSubstr("placement must hold ranks in [0, 2); got 65536"));
  eval_case["kind"] = "pancake";
  EXPECT_THAT(run_command("eval -", eval_case.dump()).out, HasSubstr("kind must be"));
}

TEST(Eval, RefusesAnUnknownStrategyOfACaseOfAKind) {
  json eval_case = json::parse(read_project_file("examples/cases/dispatch.json"));
  eval_case["strategy"] = "teleport";
  const CommandResult result = run_command("eval --check -", eval_case.dump());
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(json::parse(result.out)["error"].get<std::string>(), HasSubstr("teleport"));
  EXPECT_THAT(result.err, testing::IsEmpty());
}

TEST(Eval, RefusesDenseMapsThatNeedTooMuchMemory) {
  json eval_case = json::parse(read_project_file("examples/cases/dispatch.json"));
  eval_case["dense"] = true;
  eval_case["slots"] = eval_case["top_k"];
  eval_case["experts"] = 20'000'000;
  eval_case.erase("placement");
  eval_case["ranks"] = 1;
  json ids = json::array();
  json weights = json::array();
  std::vector<int> experts(eval_case["top_k"].get<size_t>());
  std::iota(experts.begin(), experts.end(), 0);
  for (int token = 0; token < 100; ++token) {
    ids.push_back(experts);
    weights.push_back(std::vector<double>(experts.size(), 0.5));
  }
  eval_case["per_rank"] = json::array({{{"expert_ids", ids}, {"weights", weights}}});
  const json result = json::parse(run_command("eval -", eval_case.dump()).out);
  ASSERT_TRUE(result.contains("error")) << result;
  EXPECT_THAT(result["error"].get<std::string>(), HasSubstr("eval is for small cases"));
}

// The processes read it too, and no file can be left behind: none is written.
TEST(Eval, RunsCasesOfStandardInputInProcesses) {
  for (const char* file : {"examples/cases/demo.json", "examples/cases/dispatch.json"}) {
    json eval_case = json::parse(read_project_file(file));
    const CommandResult threads = run_command("eval -", eval_case.dump());
    eval_case["communicator"] = "sockets";
    const CommandResult sockets =
        run_program("env TMPDIR=/no/such/folder " CROSSDOCK_COMMAND " eval -", eval_case.dump());
    EXPECT_EQ(sockets.status, 0) << sockets.out << sockets.err;
    EXPECT_EQ(sockets.out, threads.out) << file;
  }
}

// Values travel as JSON between processes: with every digit, and also if they are not finite.
TEST(Eval, GivesTheSameInProcesses) {
  json eval_case = json::parse(read_project_file("examples/cases/demo.json"));
  eval_case["nonfinite"] = "propagate";
  eval_case["per_rank"][0]["x"][0][0] = "NaN";
  eval_case["per_rank"][0]["x"][0][1] = "-Infinity";
  const json expected = evaluate(eval_case);
  std::vector<std::string> communicators = {"sockets"};
  if (!std::string(CROSSDOCK_MPIRUN).empty()) communicators.emplace_back("mpi");
  for (const std::string& communicator : communicators) {
    eval_case["communicator"] = communicator;
    EXPECT_EQ(evaluate(eval_case), expected) << communicator;
  }
}

TEST(Eval, ChecksTheDemo) {
  expect_checked(json::parse(read_project_file("examples/cases/demo.json")));
}

TEST(Eval, GivesTheSameForEveryStrategy) {
  json eval_case = json::parse(read_project_file("examples/cases/demo.json"));
  const json expected = evaluate(eval_case);
  for (const std::string& name : strategy_names()) {
    eval_case["strategy"] = name;
    EXPECT_EQ(evaluate(eval_case), expected) << name;
  }
}

TEST(Eval, TakesRanksPerNode) {
  json eval_case = json::parse(read_project_file("examples/cases/demo.json"));
  const json expected = evaluate(eval_case);
  eval_case["strategy"] = "hierarchical";
  eval_case["ranks_per_node"] = 2;
  EXPECT_EQ(evaluate(eval_case), expected);
}

TEST(Eval, IdentityExpertsReturnTheirRows) {
  const json result = evaluate(worked_case());
  EXPECT_EQ(result["per_rank"][0]["out"], json::parse("[[1, 2], [3, 4]]"));
  EXPECT_EQ(result["per_rank"][1]["out"], json::parse("[[2.5, 3]]"));
  EXPECT_EQ(result["per_rank"][1]["rows_per_expert"], json::parse("[3]"));
  EXPECT_EQ(result["per_rank"][1]["grad_weights"], json::parse("[[11, 0]]"));
  EXPECT_EQ(result["per_expert"], json::array());
  EXPECT_EQ(result["dropped"], json::parse("[0, 0, 0]"));
}

TEST(Eval, AppliesWeightsInTheExpertsIfAsked) {
  json eval_case = worked_case();
  const json in_combine = evaluate(eval_case);
  eval_case["weights_in"] = "experts";
  expect_checked(eval_case);
  // All products of the case are exact, so nothing changes.
  EXPECT_EQ(evaluate(eval_case), in_combine);
}

TEST(Eval, WritesEnoughDigits) {
  json eval_case = worked_case();
  eval_case["per_rank"][0]["x"][0][0] = 0.1;
  EXPECT_EQ(evaluate(eval_case)["per_rank"][0]["rows"][0][0], 0.10000000149011612);
  eval_case["dtype"] = "fp64";
  EXPECT_EQ(evaluate(eval_case)["per_rank"][0]["rows"][0][0], 0.1);
  eval_case["dtype"] = "bf16";
  EXPECT_EQ(evaluate(eval_case)["per_rank"][0]["rows"][0][0], 0.10009765625);
  eval_case["per_rank"][0]["x"][0][0] = -0.0;
  EXPECT_THAT(run_command("eval -", eval_case.dump()).out, HasSubstr("\"rows\": [[-0.0, 2]"));
}

TEST(Eval, WritesWhatIsNotFiniteAsStrings) {
  json eval_case = worked_case();
  eval_case["per_rank"][0]["x"] = json::parse(R"([["NaN", 2], ["Infinity", "-Infinity"]])");
  const json result = evaluate(eval_case);
  EXPECT_EQ(result["per_rank"][0]["out"],
            json::parse(R"([["NaN", 2], ["Infinity", "-Infinity"]])"));
  expect_checked(eval_case);
}

TEST(Eval, LooksAtNoWeightWhereThereIsNoRoute) {
  json eval_case = worked_case();
  eval_case["per_rank"][1]["weights"][0][1] = "NaN";
  eval_case["per_rank"][0]["mask"] = {true, false};
  eval_case["per_rank"][0]["weights"][0] = {"Infinity", "NaN"};
  const json result = evaluate(eval_case);
  EXPECT_EQ(result["per_rank"][0]["grad_weights"], json::parse("[[0, 0], [4, 4]]"));
  EXPECT_EQ(result["per_rank"][0]["out"][0], json::parse("[0, 0]"));
  EXPECT_EQ(result["per_rank"][1]["grad_weights"][0][1], 0);
  expect_checked(eval_case);
}

TEST(Eval, CountsMaskedTokensInTheCapacityAndSumsDrops) {
  const auto tokens = [](int count, const json& row) {
    return json(std::vector<json>(count, row));
  };
  const json rank = {{"x", tokens(4, {1})},
                     {"expert_ids", tokens(4, {0})},
                     {"weights", tokens(4, {0.5})},
                     {"grad_out", tokens(4, {1})},
                     {"mask", {true, false, false, false}}};
  const json eval_case = {{"strategy", "allgather"},
                          {"ranks", 2},
                          {"experts", 2},
                          {"width", 1},
                          {"top_k", 1},
                          {"per_rank", {rank, rank}},
                          {"capacity", {{"factor", 1.0}, {"policy", "position"}}}};
  const json result = evaluate(eval_case);  // C = 4 * 1 / 2 = 2 of 3 routes
  EXPECT_EQ(result["dropped"], json::parse("[2, 0]"));
  EXPECT_EQ(result["per_rank"][0]["rows_per_expert"], json::parse("[4]"));
  EXPECT_EQ(result["per_rank"][0]["out"], json::parse("[[0], [0.5], [0.5], [0]]"));
  expect_checked(eval_case);
}

TEST(Eval, ShowsPadRows) {
  json eval_case = worked_case();
  eval_case["alignment"] = 8;
  const json result = evaluate(eval_case);
  EXPECT_EQ(result["per_rank"][0]["rows"].size(), 16U);
  EXPECT_EQ(result["per_rank"][0]["rows"][1], json::parse("[0, 0]"));
  EXPECT_EQ(result["per_rank"][0]["rows_per_expert"], json::parse("[1, 1]"));
  expect_checked(eval_case);
}

TEST(Eval, AcceptsRanksWithoutTokens) {
  json eval_case = worked_case();
  const json none = json::array();
  for (auto& rank : eval_case["per_rank"]) {
    rank = {{"x", none}, {"expert_ids", none}, {"weights", none}, {"grad_out", none}};
  }
  const json result = evaluate(eval_case);
  for (const auto& rank : result["per_rank"]) {
    for (const char* key : {"rows", "out", "grad_x", "grad_weights"}) EXPECT_EQ(rank[key], none);
  }
  EXPECT_EQ(result["per_rank"][0]["rows_per_expert"], json::parse("[0, 0]"));
  expect_checked(eval_case);
}

TEST(Eval, GivesEmptyExpertsZeroGradientsAndNullForNoBias) {
  json eval_case = json::parse(read_project_file("examples/cases/demo.json"));
  for (auto& rank : eval_case["per_rank"]) {
    for (auto& ids : rank["expert_ids"]) ids = {2, 4};
  }
  const json result = evaluate(eval_case);
  EXPECT_EQ(result["per_expert"][0]["grad_w2"][0], json::parse("[0, 0, 0]"));
  EXPECT_EQ(result["per_expert"][0]["grad_b2"], json::parse("[0, 0, 0, 0]"));
  EXPECT_TRUE(result["per_expert"][0]["grad_b1"].is_null());
  expect_checked(eval_case);
}

// The demo with every option of a case.
TEST(Eval, IsRightForEveryActivationDtypeAndPlaceOfTheWeights) {
  const json demo = json::parse(read_project_file("examples/cases/demo.json"));
  for (const std::string_view name : kActivationNames) {
    const bool gated = is_gated(parse_activation(name));
    for (const char* weights_in : {"combine", "experts"}) {
      for (const char* dtype : {"fp64", "fp32", "bf16", "fp16"}) {
        json eval_case = demo;
        eval_case["activation"] = name;
        eval_case["weights_in"] = weights_in;
        eval_case["dtype"] = dtype;
        eval_case["interleaved"] = gated;
        eval_case["alignment"] = 8;
        for (auto& expert : eval_case["per_expert"]) {
          if (!gated) expert["w1"].erase(expert["w1"].begin() + 3, expert["w1"].end());
          expert["b1"] = std::vector<double>(gated ? 6 : 3, 0.25);
        }
        eval_case["per_expert"][1].erase("b1");  // one expert without a bias
        SCOPED_TRACE(std::string(name) + " " + weights_in + " " + dtype);
        expect_checked(eval_case);
      }
    }
  }
}

TEST(Eval, TakesEveryOption) {
  json eval_case = json::parse(read_project_file("examples/cases/demo.json"));
  eval_case["placement"] = {3, 3, 0, 1, 0, 3};
  eval_case["partial_sums"] = true;
  eval_case["nonfinite"] = "propagate";
  eval_case["capacity"] = {
      {"factor", 1.5}, {"policy", "weight"}, {"pad_to_capacity", true}, {"max_tokens", 5}};
  expect_checked(eval_case);
}

TEST(Eval, TakesPartialSumsInFp32AndInTheRowType) {
  json eval_case = json::parse(read_project_file("examples/cases/demo.json"));
  for (const char* dtype : {"fp64", "fp32", "bf16", "fp16"}) {
    eval_case["dtype"] = dtype;
    for (const json& sums : {json(false), json(true), json("fp32"), json("rows")}) {
      SCOPED_TRACE(std::string(dtype) + " " + sums.dump());
      eval_case["partial_sums"] = sums;
      expect_checked(eval_case);
    }
  }
}

TEST(Eval, FailsIfTheResultCannotBeWritten) {
  const CommandResult result = run_command("eval - > /dev/full", worked_case().dump());
  EXPECT_EQ(result.status, 1);
}

}  // namespace
}  // namespace crossdock::cli
