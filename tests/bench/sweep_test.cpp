#include "bench/sweep.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "bench/runner.hpp"
#include "bench/sample_summary.hpp"
#include "crossdock/error.hpp"
#include "support/message_of.hpp"

namespace crossdock::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr SizeOption kTokens{.name = "--tokens", .largest = 1 << 30};

std::vector<int64_t> parse(const std::vector<std::string>& entries) {
  return parse_sizes(kTokens, entries);
}

std::string complaint_about(const std::string& entry) {
  return message_of([&] { parse({entry}); }, ErrorCode::kInvalidArgument);
}

TEST(Sizes, AreNumbersListsAndRanges) {
  EXPECT_THAT(parse({}), IsEmpty());
  EXPECT_THAT(parse({"512", "128"}), ElementsAre(512, 128));
  EXPECT_THAT(parse({"128:1024:x2"}), ElementsAre(128, 256, 512, 1024));
  EXPECT_THAT(parse({"100:1000:x3"}), ElementsAre(100, 300, 900));
  EXPECT_THAT(parse({"64:200:+64"}), ElementsAre(64, 128, 192));
  EXPECT_THAT(parse({"7", "1:2:x2", "3:4:+1"}), ElementsAre(7, 1, 2, 3, 4));
  EXPECT_THAT(parse({"5:5:x2"}), ElementsAre(5));
}

TEST(Sizes, TakeLettersAndPowersOfTen) {
  EXPECT_THAT(parse({"8k", "2K", "1M", "1e6"}), ElementsAre(8192, 2048, 1048576, 1000000));
  EXPECT_THAT(parse({"1k:4k:x2", "1k:3k:+1k"}), ElementsAre(1024, 2048, 4096, 1024, 2048, 3072));
  EXPECT_THAT(complaint_about("9999999999G"), HasSubstr("to 1073741824, got 9999999999G"));
  EXPECT_THAT(complaint_about("1e99"), HasSubstr("to 1073741824, got 1e99"));
}

TEST(Sizes, MayEndAtTheLargestNumber) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  const std::string largest = std::to_string(kLargest);
  const SizeOption all{.name = "--tokens", .largest = kLargest - 1};
  EXPECT_THAT(parse_sizes(all, {"1:" + std::to_string(kLargest - 1) + ":x4294967296"}),
              ElementsAre(1, int64_t{1} << 32));
  EXPECT_THAT(parse_sizes(all, {"1:2:+" + largest}), ElementsAre(1));
}

TEST(Sizes, RefuseWhatIsNoRange) {
  for (const char* entry :
       {"many", "", "1.5", "1e-3", "1kk", "128:", "128:512", "128:512:", "128:512:2", "128:512:*2",
        "a:512:x2", "128:b:x2", "128:512:x", "128:512:xx", "128:512:x2:x2", " 128"}) {
    EXPECT_THAT(complaint_about(entry),
                HasSubstr("--tokens must be a whole number or a range like 128:4096:x2"))
        << entry;
    EXPECT_THAT(complaint_about(entry), HasSubstr(std::string("got \"") + entry + "\""));
  }
  EXPECT_THAT(complaint_about("0"), HasSubstr("--tokens must be from 1 to 1073741824, got 0"));
  EXPECT_THAT(complaint_about("-3"), HasSubstr("to 1073741824, got -3"));
  EXPECT_THAT(complaint_about("99999999999999999999"), HasSubstr("got 99999999999999999999"));
  EXPECT_THAT(complaint_about("0:512:x2"), HasSubstr("must be from 1 to 1073741824, got 0"));
  EXPECT_THAT(complaint_about("512:128:x2"), HasSubstr("first value of a range must be at most"));
  EXPECT_THAT(complaint_about("128:512:x1"), HasSubstr("factor of a range must be at least 2"));
  EXPECT_THAT(complaint_about("128:512:+0"), HasSubstr("step of a range must be at least 1"));
  EXPECT_THAT(complaint_about("128:512:+-1"), HasSubstr("step of a range must be at least 1"));
  EXPECT_THAT(complaint_about("1:1001:+1"), HasSubstr("must have at most 1000 values"));
  EXPECT_EQ(parse({"1:1000:+1"}).size(), 1000U);
}

TEST(Sweep, CombinesAllSizesInAFixedOrder) {
  const Scenario base = find_scenarios({"custom"})[0];
  std::vector<std::string> list;
  for (const Scenario& s : sweep(base, {.ranks = {2, 1},
                                       .tokens = {3, 4},
                                       .width = {16},
                                       .top_k = {},
                                       .experts = {},
                                       .dtypes = {DType::kBF16, DType::kF32}})) {
    EXPECT_EQ(s.name, "custom");
    EXPECT_EQ(s.width, 16);
    EXPECT_EQ(s.top_k, base.top_k);
    list.push_back(std::string(name_of(s.dtype)) + " P" + std::to_string(s.ranks) + " T" +
                   std::to_string(s.tokens));
  }
  EXPECT_THAT(list, ElementsAre("bf16 P2 T3", "bf16 P2 T4", "bf16 P1 T3", "bf16 P1 T4",
                                "fp32 P2 T3", "fp32 P2 T4", "fp32 P1 T3", "fp32 P1 T4"));
}

TEST(Sweep, KeepsTheRankOfScenariosForOne) {
  const Scenario layer = find_scenarios({"layer-qwen3"})[0];
  const auto list = sweep(layer, {.ranks = {2, 4}, .tokens = {64, 128}});
  ASSERT_EQ(list.size(), 2U);
  EXPECT_EQ(list[1].ranks, 1);
  EXPECT_EQ(list[1].tokens, 128);
}

TEST(Sweep, RefusesSizesThatCannotBe) {
  const auto complaint = [](const char* scenario, const Sizes& sizes) {
    return message_of([&] { sweep(find_scenarios({scenario})[0], sizes); },
                      ErrorCode::kInvalidArgument);
  };
  EXPECT_THAT(complaint("custom", {.experts = {8, 4}}), "experts (4) must be at least top_k (8)");
  EXPECT_THAT(complaint("layer", {.dtypes = {DType::kBF16}}),
              HasSubstr("dtype of scenario layer must be fp32, got bf16"));
  EXPECT_THAT(complaint("grouped-qwen3", {.dtypes = {DType::kF32}}), HasSubstr("must be bf16"));
  EXPECT_THAT(complaint("experts-gemm", {.tokens = {100}}), HasSubstr("a multiple of experts (8)"));
  EXPECT_THAT(complaint("agree", {.tokens = {100}}), HasSubstr("--ranks must be its only size"));
  EXPECT_THAT(complaint("custom", {.tokens = {1 << 30}, .width = {1 << 30}}),
              HasSubstr("sizes must be smaller"));
  const std::vector<int64_t> many = parse({"1:40:+1"});
  EXPECT_THAT(complaint("custom", {.tokens = many, .width = many}),
              HasSubstr("more than 1000 combinations"));
}

TEST(Sweep, RunsEachStrategyAtAllSizes) {
  const auto cases = select_cases({.scenarios = {"custom"},
                                   .strategies = {"direct", "alltoall"},
                                   .communicators = {"threads"},
                                   .sizes = {.tokens = {3, 4}}});
  ASSERT_EQ(cases.size(), 4U);
  EXPECT_EQ(cases[1].strategy, "direct");
  EXPECT_EQ(cases[1].scenario.tokens, 4);
  EXPECT_EQ(cases[2].strategy, "alltoall");
  EXPECT_EQ(cases[2].scenario.tokens, 3);
  EXPECT_THAT(message_of(
                  [] {
                    select_cases({.scenarios = {"custom"},
                                  .strategies = {"direct", "alltoall"},
                                  .communicators = {"threads"},
                                  .sizes = {.tokens = parse({"1:501:+1"})}});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("must be at most 1000"));
}

TEST(Summary, HasThePercentilesOfTheSamples) {
  const StepResult odd = summarize("step", {11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  EXPECT_EQ(odd.name, "step");
  EXPECT_DOUBLE_EQ(odd.min_us, 1);
  EXPECT_DOUBLE_EQ(odd.p10_us, 2);
  EXPECT_DOUBLE_EQ(odd.median_us, 6);
  EXPECT_DOUBLE_EQ(odd.p90_us, 10);
  EXPECT_DOUBLE_EQ(odd.max_us, 11);
  const StepResult even = summarize("step", {20, 10});
  EXPECT_DOUBLE_EQ(even.p10_us, 11);
  EXPECT_DOUBLE_EQ(even.median_us, 15);
  EXPECT_DOUBLE_EQ(even.p90_us, 19);
  EXPECT_DOUBLE_EQ(summarize("step", {7}).p90_us, 7);
}

}  // namespace
}  // namespace crossdock::bench
