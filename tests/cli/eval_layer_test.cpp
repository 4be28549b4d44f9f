// Cases of whole layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "crossdock/testing/layer_worlds.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

TEST(EvalLayer, JudgesTheWholeLayerInTheDocs) {
  const std::string page = read_project_file("docs/case_format.md");
  const size_t begin = page.find(R"({"kind": "layer")");
  const CommandResult result =
      run_command("eval -", page.substr(begin, page.find("```", begin) - begin));
  EXPECT_EQ(result.status, 0) << result.out << result.err;
}

// The same options and values, or the bits would differ.
TEST(EvalLayer, GivesRandomLayersTheirBitsFromTheirFiles) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    conformance::LayerSpec spec = conformance::random_layer_spec(seed, 3);
    spec.config.dispatch.partial_sums = PartialSums::kNone;
    const testing::RandomCase layer = testing::layer_case(spec);
    uint64_t bits = 0;
    run_ranks(3, [&](Group& group) {
      const auto verdict = testing::judge_case(group, layer, {"direct"}, built_in_strategies());
      if (group.rank() == 0) bits = verdict.bits;
    });
    const CommandResult result = run_command("eval -", layer.to_file("direct", "threads", "cpu"));
    ASSERT_EQ(result.status, 0) << result.out << result.err << layer.summary;
    const std::string checksum = json::parse(result.out)["checksum"];
    EXPECT_EQ(std::stoull(checksum, nullptr, 16), bits) << layer.summary;
  }
}

TEST(EvalLayer, RefusesWholeLayersThatCannotBe) {
  const auto error_of = [](const std::string& layer) {
    const CommandResult result =
        run_command("eval -", R"({"kind": "layer", "strategy": "auto", "layer": )" + layer + "}");
    EXPECT_EQ(result.status, 1);
    return json::parse(result.out)["error"].get<std::string>();
  };
  const std::string sizes = R"({"tokens": [1], "experts": 2, "top_k": 1, "width": 1, "inner": 1)";
  EXPECT_THAT(error_of(R"({"experts": 4})"), HasSubstr("the key \"tokens\""));
  EXPECT_THAT(error_of(sizes + R"(, "expert": 4})"), HasSubstr("unknown key \"expert\""));
  EXPECT_THAT(error_of(sizes + R"(, "score": "x"})"), HasSubstr("softmax, softmax_after_top_k"));
  EXPECT_THAT(error_of(sizes + R"(, "etp": -1})"), HasSubstr("layer.etp must be an integer in"));
  EXPECT_THAT(error_of(sizes + R"(, "etp": 3})"), HasSubstr("do not fit together"));
  EXPECT_THAT(error_of(sizes + R"(, "shared_inner": 999999999})"), HasSubstr("are accepted"));
  EXPECT_THAT(error_of(sizes + R"(, "num_sequences": 2147483647})"), HasSubstr("are accepted"));
  EXPECT_THAT(error_of(sizes + R"(, "alignment": 2147483647})"), HasSubstr("are accepted"));
  EXPECT_THAT(error_of(sizes + R"(, "capacity_factor": 1e300})"), HasSubstr("are accepted"));
  EXPECT_THAT(error_of(sizes + R"(, "placement": [4294967296, 0]})"),
              HasSubstr("layer.placement must be an integer in"));
}

}  // namespace
}  // namespace crossdock::cli
