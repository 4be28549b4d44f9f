// For every invalid case: only {"error": message} on standard output, and status 1.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "cli/command.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;

void expect_error(const CommandResult& result, const std::vector<std::string>& words) {
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, IsEmpty());
  const json parsed = json::parse(result.out, nullptr, false);
  ASSERT_TRUE(parsed.is_object()) << result.out;
  ASSERT_EQ(parsed.size(), 1U) << result.out;
  ASSERT_TRUE(parsed.contains("error")) << result.out;
  for (const std::string& word : words) {
    EXPECT_THAT(parsed["error"].get<std::string>(), HasSubstr(word));
  }
}

TEST(EvalError, UnreadableFiles) {
  expect_error(run_command("eval no_such_file.json"), {"cannot read", "no_such_file.json"});
  expect_error(run_command("eval /"), {"cannot read"});
}

TEST(EvalError, TextsThatAreNoCase) {
  expect_error(run_command("eval -", ""), {"not JSON"});
  expect_error(run_command("eval -", "{\"ranks\": 2,"), {"not JSON", "line 1"});
  expect_error(run_command("eval -", "[1, 2]"), {"must be an object"});
  expect_error(run_command("eval -", "{\"ranks\": 1, \"ranks\": 2}"), {"\"ranks\"", "twice"});
  expect_error(run_command("eval -", "{\"ranks\": \"\xff\"}"), {"not JSON"});
  const std::string deep = std::string(80000, '[') + std::string(80000, ']');
  expect_error(run_command("eval -", deep), {"must nest at most 64 deep"});
  expect_error(run_command("eval -", "{\"ranks\": " + deep + "}"), {"must nest at most 64 deep"});
  expect_error(run_command("eval -", std::string(100000, '[')), {"must nest at most 64 deep"});
  std::string objects = "1";
  for (int i = 0; i < 100; ++i) objects = "{\"experts\": " + objects + "}";
  expect_error(run_command("eval -", objects), {"must nest at most 64 deep"});
  expect_error(run_command("eval -", "{\"width\": 1e999}"), {"not JSON"});
}

struct Wrong {
  const char* name;
  std::function<void(json&)> change;
  std::vector<std::string> words;
};

// GoogleTest's name for it.
void PrintTo(const Wrong& wrong, std::ostream* out) {  // NOLINT(readability-identifier-naming)
  *out << wrong.name;
}

class WrongCase : public testing::TestWithParam<Wrong> {};

TEST_P(WrongCase, IsReported) {
  json eval_case = json::parse(read_project_file("examples/cases/worked.json"));
  GetParam().change(eval_case);
  expect_error(run_command("eval -", eval_case.dump()), GetParam().words);
  expect_error(run_command("eval --check -", eval_case.dump()), GetParam().words);
}

const auto kNameOf = [](const auto& info) { return std::string(info.param.name); };

json& rank(json& c, int r) {
  return c["per_rank"][static_cast<size_t>(r)];
}

INSTANTIATE_TEST_SUITE_P(
    Keys, WrongCase,
    testing::Values(
        Wrong{"UnknownKey", [](json& c) { c["stratgy"] = 1; }, {"\"stratgy\"", "strategy"}},
        Wrong{"UnknownKeyOfARank", [](json& c) { rank(c, 1)["y"] = 1; }, {"per_rank[1]", "\"y\""}},
        Wrong{"NoStrategy", [](json& c) { c.erase("strategy"); }, {"\"strategy\""}},
        Wrong{"NoRanks", [](json& c) { c.erase("ranks"); }, {"\"ranks\""}},
        Wrong{"NoTokens", [](json& c) { rank(c, 0).erase("x"); }, {"per_rank[0]", "\"x\""}},
        Wrong{"NoGradOut", [](json& c) { rank(c, 1).erase("grad_out"); }, {"\"grad_out\""}},
        Wrong{"OtherStrategy",
              [](json& c) { c["strategy"] = "teleport"; },
              {"teleport", "allgather", "alltoall"}},
        Wrong{"OtherCommunicator",
              [](json& c) { c["communicator"] = "pigeons"; },
              {"communicator", "threads", "pigeons"}},
        Wrong{"OtherDtype", [](json& c) { c["dtype"] = "fp12"; }, {"fp12", "fp32"}},
        Wrong{"DtypeWithoutSums", [](json& c) { c["dtype"] = "fp8_e4m3"; }, {"dtype", "fp8_e4m3"}},
        Wrong{"OtherPlaceOfWeights",
              [](json& c) { c["weights_in"] = "router"; },
              {"weights_in", "router"}},
        Wrong{"OtherPolicy",
              [](json& c) {
                c["capacity"] = {{"factor", 1}, {"policy", "random"}};
              },
              {"policy", "random"}},
        Wrong{"NoFactor", [](json& c) { c["capacity"] = json::object(); }, {"capacity", "factor"}},
        Wrong{"NegativeFactor",
              [](json& c) {
                c["capacity"] = {{"factor", -1}};
              },
              {"factor", "-1"}}),
    kNameOf);

INSTANTIATE_TEST_SUITE_P(
    Sizes, WrongCase,
    testing::Values(
        Wrong{"ZeroRanks", [](json& c) { c["ranks"] = 0; }, {"ranks", "0"}},
        Wrong{"FractionOfARank", [](json& c) { c["ranks"] = 1.5; }, {"ranks", "1.5"}},
        Wrong{"OtherNumberOfRanks", [](json& c) { c["ranks"] = 3; }, {"per_rank", "3", "2"}},
        Wrong{"NegativeWidth", [](json& c) { c["width"] = -2; }, {"width", "-2"}},
        Wrong{"MoreRoutesThanExperts",
              [](json& c) { c["experts"] = 1; },
              {"num_experts (1)", "top_k (2)"}},
        Wrong{"PartialSums",
              [](json& c) { c["partial_sums"] = "bf16"; },
              {"partial_sums must be false, true, \"fp32\" or \"rows\"", "bf16"}},
        Wrong{"Alignment", [](json& c) { c["alignment"] = 7; }, {"alignment", "7"}},
        Wrong{"PlacementTooShort",
              [](json& c) {
                c["placement"] = {0, 1};
              },
              {"placement", "3"}},
        Wrong{"PlacementOffTheRanks",
              [](json& c) {
                c["placement"] = {0, 2, 1};
              },
              {"placement", "expert 1", "2"}},
        Wrong{"WidthOfX",
              [](json& c) {
                rank(c, 0)["x"][1] = {1, 2, 3};
              },
              {"rank 0", "token 1", "x", "width", "3"}},
        Wrong{"FlatX",
              [](json& c) {
                rank(c, 0)["x"] = {1, 2, 3, 4};
              },
              {"rank 0", "token 0"}},
        Wrong{"RowsOfIds",
              [](json& c) {
                rank(c, 1)["expert_ids"].push_back({0, 1});
              },
              {"rank 1", "expert_ids", "1", "2"}},
        Wrong{"SlotsOfWeights",
              [](json& c) { rank(c, 0)["weights"][1] = {1}; },
              {"rank 0", "token 1", "weights", "top_k"}},
        Wrong{"RowsOfGradOut",
              [](json& c) { rank(c, 0)["grad_out"].erase(0); },
              {"rank 0", "grad_out", "2"}},
        Wrong{"LengthOfMask", [](json& c) { rank(c, 0)["mask"] = {true}; }, {"rank 0", "mask"}},
        Wrong{"ATerabyteOfExperts", [](json& c) { c["experts"] = 2000000000; }, {"GiB"}},
        Wrong{"ATerabyteOfPadRows",
              [](json& c) {
                c["capacity"] = {{"factor", 1e9}, {"pad_to_capacity", true}, {"max_tokens", 1000}};
              },
              {"GiB"}}),
    kNameOf);

INSTANTIATE_TEST_SUITE_P(
    Values, WrongCase,
    testing::Values(Wrong{"IdTooLarge",
                          [](json& c) { rank(c, 0)["expert_ids"][1][0] = 3; },
                          {"rank 0", "token 1", "slot 0", "3"}},
                    Wrong{"IdTooLargeForAnInteger",
                          [](json& c) { rank(c, 0)["expert_ids"][1][0] = 18446744073709551615U; },
                          {"rank 0", "token 1", "slot 0"}},
                    Wrong{"IdBelowMinusOne",
                          [](json& c) { rank(c, 1)["expert_ids"][0][1] = -2; },
                          {"rank 1", "token 0", "slot 1", "-2"}},
                    Wrong{"IdWithAFraction",
                          [](json& c) { rank(c, 1)["expert_ids"][0][1] = 0.5; },
                          {"rank 1", "token 0", "slot 1", "0.5"}},
                    Wrong{"RepeatedId",
                          [](json& c) {
                            rank(c, 0)["expert_ids"][1] = {2, 2};
                          },
                          {"rank 0", "token 1", "slot 1"}},
                    Wrong{"NanWeight",
                          [](json& c) { rank(c, 0)["weights"][0][1] = "NaN"; },
                          {"rank 0", "token 0", "slot 1", "NaN"}},
                    Wrong{"InfiniteWeight",
                          [](json& c) { rank(c, 1)["weights"][0][0] = "Infinity"; },
                          {"rank 1", "token 0", "slot 0", "Infinity"}},
                    Wrong{"WordForAWeight",
                          [](json& c) { rank(c, 1)["weights"][0][0] = "half"; },
                          {"rank 1", "token 0", "slot 0", "half"}},
                    Wrong{"NullForANumber",
                          [](json& c) { rank(c, 0)["x"][1][1] = nullptr; },
                          {"rank 0", "token 1", "x[1]", "null"}},
                    Wrong{"TooLargeForTheDtype",
                          [](json& c) { rank(c, 0)["x"][0][1] = 1e39; },
                          {"rank 0", "token 0", "x[1]", "fp32"}},
                    Wrong{"NumberForAMask",
                          [](json& c) { rank(c, 1)["mask"] = {2}; },
                          {"rank 1", "token 0", "mask", "2"}}),
    kNameOf);

void add_experts(json& c) {
  c["inner"] = 1;
  c["activation"] = "gelu";
  c["per_expert"] = std::vector<json>(3, {{"w1", {{1, 1}}}, {"w2", {{1}, {1}}}});
}

INSTANTIATE_TEST_SUITE_P(Experts, WrongCase,
                         testing::Values(Wrong{"NoActivation",
                                               [](json& c) {
                                                 add_experts(c);
                                                 c.erase("activation");
                                               },
                                               {"\"activation\""}},
                                         Wrong{"NoInner",
                                               [](json& c) {
                                                 add_experts(c);
                                                 c.erase("inner");
                                               },
                                               {"\"inner\""}},
                                         Wrong{"OtherActivation",
                                               [](json& c) { c["activation"] = "tanh"; },
                                               {"tanh", "swiglu"}},
                                         Wrong{"OtherNumberOfExperts",
                                               [](json& c) {
                                                 add_experts(c);
                                                 c["per_expert"].erase(0);
                                               },
                                               {"per_expert", "3", "2"}},
                                         Wrong{"HeightOfAGatedMatrix",
                                               [](json& c) {
                                                 add_experts(c);
                                                 c["activation"] = "swiglu";
                                               },
                                               {"per_expert[0].w1", "2 * inner"}},
                                         Wrong{"WidthOfW2",
                                               [](json& c) {
                                                 add_experts(c);
                                                 c["per_expert"][2]["w2"][1] = {1, 2};
                                               },
                                               {"per_expert[2].w2[1]", "inner"}},
                                         Wrong{"LengthOfABias",
                                               [](json& c) {
                                                 add_experts(c);
                                                 c["per_expert"][1]["b2"] = {1};
                                               },
                                               {"per_expert[1].b2", "width"}},
                                         Wrong{"WordInAMatrix",
                                               [](json& c) {
                                                 add_experts(c);
                                                 c["per_expert"][1]["w1"][0][1] = "x";
                                               },
                                               {"per_expert[1].w1[0][1]"}}),
                         kNameOf);

}  // namespace
}  // namespace crossdock::cli
