#include "bench/runner.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "bench/link_rows.hpp"
#include "bench/memory.hpp"
#include "crossdock/error.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "support/message_of.hpp"

namespace crossdock::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> names(const std::vector<Scenario>& scenarios) {
  std::vector<std::string> list(scenarios.size());
  std::ranges::transform(scenarios, list.begin(), &Scenario::name);
  return list;
}

Scenario small_scenario() {
  return {.name = "small",
          .ranks = 3,
          .tokens = 13,
          .width = 20,
          .top_k = 3,
          .experts = 7,
          .backward = true};
}

TEST(Scenarios, AreFoundByNameAndByBeginning) {
  EXPECT_THAT(names(find_scenarios({"cpu-large"})), ElementsAre("cpu-large"));
  EXPECT_THAT(names(find_scenarios({"scale-t*"})),
              ElementsAre("scale-t4096", "scale-t16384", "scale-t65536"));
  EXPECT_FALSE(find_scenarios({}).empty());
  EXPECT_THAT(message_of([] { find_scenarios({"cpu-huge"}); }, ErrorCode::kInvalidArgument),
              HasSubstr("must be one of cpu-large"));
}

TEST(Scenarios, CpuLargeHasItsSizes) {
  const Scenario s = find_scenarios({"cpu-large"})[0];
  EXPECT_EQ(s.ranks, 4);
  EXPECT_EQ(s.token_bytes() + s.row_bytes(),
            (int64_t{4096} * 2048 + int64_t{4096} * 8 * 2048) * 4 * 4);
}

TEST(Selection, CrossesStrategiesAndCommunicators) {
  const auto cases = select_cases({.scenarios = {"decode"},
                                   .strategies = {"alltoall", "allgather"},
                                   .communicators = {"threads"},
                                   .sizes = {.ranks = {2}}});
  ASSERT_EQ(cases.size(), 2U);
  EXPECT_EQ(cases[0].strategy, "alltoall");
  EXPECT_EQ(cases[1].communicator, "threads");
  EXPECT_EQ(cases[1].scenario.ranks, 2);
}

TEST(Selection, RefusesUnknownNames) {
  EXPECT_THAT(
      message_of([] { select_cases({.strategies = {"teleport"}}); }, ErrorCode::kInvalidArgument),
      HasSubstr("strategy must be one of"));
  EXPECT_THAT(
      message_of([] { select_cases({.communicators = {"pigeons"}}); }, ErrorCode::kInvalidArgument),
      HasSubstr("communicator must be one of threads, mpi"));
  EXPECT_THAT(message_of(
                  [] {
                    select_cases({.scenarios = {"cpu-large"},
                                  .strategies = {"anchor-mpi-pack"},
                                  .communicators = {"threads"}});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("needs communicator mpi"));
}

TEST(Selection, RunsGpuScenariosOnThreadsUnlessProcessesAreChosen) {
  const auto alone = select_cases({.scenarios = {"h200-decode"}});
  ASSERT_EQ(alone.size(), 1U);
  EXPECT_EQ(alone[0].communicator, "cuda");
  EXPECT_FALSE(has_processes(alone[0]));
  const auto both =
      select_cases({.scenarios = {"h200-decode"}, .communicators = {"sockets", "threads"}});
  ASSERT_EQ(both.size(), 2U);
  EXPECT_EQ(both[0].communicator, "sockets");
  EXPECT_TRUE(has_processes(both[0]));
  EXPECT_EQ(both[1].communicator, "cuda");
}

TEST(Selection, RefusesProcessesForOneRankOnAGpu) {
  EXPECT_THAT(
      message_of([] { select_cases({.scenarios = {"layer-qwen3"}, .communicators = {"sockets"}}); },
                 ErrorCode::kInvalidArgument),
      HasSubstr("layer-qwen3 has one rank, a thread of the command"));
}

// 3 ranks and 6 experts, on ranks 0, 0, 1, 1, 2, 2.
TEST(LinkRows, AreThoseWhoseExpertIsOnAnotherGpu) {
  const Workload workload(
      {.name = "small", .ranks = 3, .tokens = 50, .width = 4, .top_k = 2, .experts = 6});
  const LinkRows none = count_link_rows(workload, 1, Copies::kPerRoute);
  EXPECT_EQ(none.most_one_way(), 0);
  EXPECT_EQ(most_there_and_back(none, none), 0);
  std::vector<int64_t> sent(2);  // ranks 0 and 2 are on GPU 0, rank 1 on GPU 1
  for (int rank = 0; rank < 3; ++rank) {
    for (const int32_t expert : workload.expert_ids(rank)) {
      const bool is_on_gpu_1 = expert == 2 || expert == 3;
      if (is_on_gpu_1 != (rank == 1)) ++sent[rank == 1 ? 1 : 0];
    }
  }
  const LinkRows two = count_link_rows(workload, 2, Copies::kPerRoute);
  EXPECT_EQ(two.sent, sent);
  EXPECT_THAT(two.received, ElementsAre(sent[1], sent[0]));
  EXPECT_EQ(two.most_one_way(), std::max(sent[0], sent[1]));
  EXPECT_EQ(most_there_and_back(two, two), sent[0] + sent[1]);
}

// The same experts: a token has two of them on one rank, or on two.
TEST(LinkRows, OfACopyPerRankAreThoseOfATokensFirstRouteThere) {
  const Workload workload(
      {.name = "small", .ranks = 3, .tokens = 50, .width = 4, .top_k = 2, .experts = 6});
  const LinkRows routes = count_link_rows(workload, 3, Copies::kPerRoute);
  const LinkRows copies = count_link_rows(workload, 3, Copies::kPerRank);
  for (int rank = 0; rank < 3; ++rank) {
    const auto r = static_cast<size_t>(rank);
    int64_t repeated = 0;
    const auto& experts = workload.expert_ids(rank);
    for (size_t route = 0; route < experts.size(); route += 2) {
      const int owner = experts[route] / 2;
      if (owner == experts[route + 1] / 2 && owner != rank) ++repeated;
    }
    EXPECT_GT(repeated, 0);
    EXPECT_EQ(copies.sent[r], routes.sent[r] - repeated);
  }
  EXPECT_EQ(count_link_rows(workload, 3, Copies::kAuto).sent, copies.sent);
}

TEST(Selection, GivesRanksOnAGpuTheCopiesThatAreAskedFor) {
  const auto cases =
      select_cases({.scenarios = {"h200-decode", "decode"}, .copies = Copies::kPerRank});
  for (const Case& one : cases) {
    EXPECT_EQ(one.scenario.copies, one.scenario.runs_on_gpu() ? Copies::kPerRank : Copies::kAuto);
  }
  EXPECT_GE(cases.size(), 2U);
}

TEST(Selection, RunsLayersOfAGpuOnOneRank) {
  const auto cases = select_cases({.scenarios = {"layer-qwen3", "grouped-qwen3*"},
                                   .communicators = {"threads"},
                                   .sizes = {.ranks = {4}},
                                   .max_sms = 16});
  ASSERT_EQ(cases.size(), 3U);
  for (const Case& one : cases) {
    EXPECT_EQ(one.scenario.ranks, 1);
    EXPECT_EQ(one.scenario.max_sms, 16);
    EXPECT_EQ(one.scenario.dtype, DType::kBF16);
    EXPECT_EQ(one.communicator, "cuda");
    EXPECT_FALSE(has_processes(one));
  }
  EXPECT_EQ(cases[0].scenario.experts, 128);
  EXPECT_FALSE(cases[1].scenario.skewed);
  EXPECT_TRUE(cases[2].scenario.skewed);
}

TEST(RunCase, MeasuresAndChecksEveryStrategy) {
  for (const std::string& strategy : strategy_names()) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Case one{small_scenario(), strategy, "threads"};
      one.scenario.dtype = dtype;
      const Result result = run_case(one, {.repeats = {.warm_up = 1, .timed = 2}});
      EXPECT_TRUE(result.checked);
      std::vector<std::string> steps;
      for (const StepResult& step : result.steps) steps.push_back(step.name);
      EXPECT_THAT(steps, ElementsAre("plan", "dispatch", "combine", "combine_backward",
                                     "dispatch_backward"));
      const int64_t element = size_of(dtype);
      EXPECT_EQ(result.steps[1].bytes, (13 * 20 + 13 * 3 * 20) * element * 3);
      EXPECT_EQ(result.steps[3].bytes, (13 * 20 + 2 * 13 * 3 * 20) * element * 3);
      EXPECT_GT(result.steps[1].median_us, 0.0);
    }
  }
}

TEST(RunCase, MeasuresExpertsBesidePlainProducts) {
  const Case one{{.name = "small",
                  .kind = ScenarioKind::kExperts,
                  .ranks = 1,
                  .tokens = 12,
                  .width = 48,
                  .top_k = 1,
                  .experts = 3,
                  .inner = 32},
                 "none",
                 "none"};
  const Result result = run_case(one, {.repeats = {.warm_up = 0, .timed = 1}});
  ASSERT_FALSE(result.steps.empty());
  EXPECT_EQ(result.steps[0].name, "experts");
  EXPECT_GT(result.steps[0].gflops, 0.0);
}

TEST(RunCase, MeasuresTheRendezvousOfEachCommunicator) {
  const auto cases = select_cases({.scenarios = {"agree"},
                                   .strategies = {"direct"},
                                   .communicators = {"threads"},
                                   .sizes = {.ranks = {2}}});
  ASSERT_EQ(cases.size(), 1U);
  EXPECT_EQ(cases[0].strategy, "none");
  const Result result = run_case(cases[0], {.repeats = {.warm_up = 0, .timed = 2}});
  ASSERT_EQ(result.steps.size(), 1U);
  EXPECT_EQ(result.steps[0].name, "agree");
  EXPECT_GT(result.steps[0].median_us, 0.0);
  EXPECT_LE(result.steps[0].min_us, result.steps[0].median_us);
}

TEST(RunCase, RefusesWhatDoesNotFitIntoMemory) {
  Case one{small_scenario(), "alltoall", "threads"};
  one.scenario.width = int64_t{1} << 40;
  EXPECT_GT(needed_bytes(one.scenario), available_bytes());
  EXPECT_THAT(message_of([&] { run_case(one, {}); }, ErrorCode::kCapacity),
              HasSubstr("scenario small needs"));
}

}  // namespace
}  // namespace crossdock::bench
