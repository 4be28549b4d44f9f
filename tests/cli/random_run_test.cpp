// Random cases must find strategies with one fault each, name the case, reduce it and write a file
// that reproduces it.
#include "cli/verify/random_run.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "cli/eval/dispatch_case.hpp"
#include "cli/verify/case_watch.hpp"
#include "cli/verify/random_cases.hpp"
#include "cli/verify/random_report.hpp"
#include "crossdock/error.hpp"
#include "testing/conformance/faulty_strategy.hpp"

namespace crossdock::cli {
namespace {

using conformance::Faults;
using conformance::World;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// A run on up to three ranks with the strategy `direct`, disturbed by these faults.
RandomRun run_with(const Faults& faults, int64_t count) {
  RandomRun run{.seed = 7,
                .count = count,
                .most_ranks = 3,
                .strategies = {"direct"},
                .candidates = {},
                .group = {.arrival_deadline = std::chrono::seconds(60),
                          .progress_deadline = std::chrono::seconds(60)},
                .most_failures = 1};
  run.candidates.add([faults] {
    return std::make_unique<conformance::FaultyStrategy>(make_strategy("direct"), faults);
  });
  return run;
}

struct Found {
  RandomFailure failure;
  World reduced;
};

// The first failure of a run that is not a layer's; its reduced case has gone through a file.
Found find_and_reduce(RandomRun run) {
  run.most_failures = 100;
  const RandomResult result = run_random_on_threads(run);
  const auto first = std::ranges::find_if(result.failures, [&](const RandomFailure& failure) {
    return make_random_case(run.seed, failure.number, run.most_ranks).kind == "dispatch";
  });
  if (first == result.failures.end()) {
    ADD_FAILURE() << "no dispatch of " << result.num_cases << " cases failed";
    return {};
  }
  Found found{.failure = *first, .reduced = {}};
  const auto fails = [&](const testing::RandomCase& one) {
    return !judge_on_threads(run, one, "direct").passed();
  };
  const testing::RandomCase reduced =
      testing::reduce(make_random_case(run.seed, found.failure.number, run.most_ranks), fails);
  const DispatchCase file = parse_dispatch_case(reduced.to_file("direct", "threads", "cpu"));
  const testing::RandomCase again = random_case_of(file.world, file.ranks_per_node);
  EXPECT_TRUE(fails(again)) << "the file does not reproduce the failure";
  RandomRun right = run;
  right.candidates = built_in_strategies();
  EXPECT_TRUE(judge_on_threads(right, again, "direct").passed());
  found.reduced = file.world;
  return found;
}

int64_t num_tokens(const World& world) {
  int64_t count = 0;
  for (const reference::RankInput& rank : world.ranks) count += rank.T;
  return count;
}

TEST(RandomRun, PassesStrategiesWithoutFaults) {
  RandomRun run = run_with({}, 100);
  run.strategies.clear();
  run.candidates = built_in_strategies();
  const RandomResult result = run_random_on_threads(run);
  for (const RandomFailure& failure : result.failures) {
    ADD_FAILURE() << failure.number << ": " << ::testing::PrintToString(failure.findings);
  }
  EXPECT_EQ(result.num_cases, 100);
}

TEST(RandomRun, HasTheSameChecksumWithEveryStrategyAndInParts) {
  RandomRun run = run_with({}, 96);
  run.candidates = built_in_strategies();
  const uint64_t checksum = run_random_on_threads(run).checksum;
  EXPECT_NE(checksum, 0);
  for (const std::string& strategy : strategy_names()) {
    run.strategies = {strategy};
    EXPECT_EQ(run_random_on_threads(run).checksum, checksum) << strategy;
  }
  uint64_t sum = 0;
  run.count = 48;
  for (run.first = 0; run.first < 96; run.first += 48) sum += run_random_on_threads(run).checksum;
  EXPECT_EQ(sum, checksum);
}

TEST(RandomRun, FindsTwoRowsSwapped) {
  const auto swap = [](const StrategyCall& call, std::span<const RowPart> parts) {
    if (call.plan.num_rows() < 2) return;
    const RowPart& part = parts[0];
    std::swap_ranges(part.rows, part.rows + part.row_bytes, part.rows + part.row_bytes);
  };
  const Found found = find_and_reduce(run_with({.after_scatter = swap}, 200));
  EXPECT_THAT(found.failure.findings, Contains(HasSubstr("is not token")));
  EXPECT_EQ(found.reduced.ranks.size(), 1);
  EXPECT_LE(num_tokens(found.reduced), 2);
  EXPECT_EQ(found.reduced.config.width, 1);
  EXPECT_FALSE(found.reduced.config.capacity || found.reduced.config.max_rows);
}

// Only on one rank, in sums of bf16 with an alignment.
TEST(RandomRun, FindsABitThatFlipsUnderRareConditions) {
  const auto flip = [](Strategy& inner, const StrategyCall& call, const GatherSumArgs& args) {
    inner.gather_sum(call, args);
    if (call.group.rank() != 1 || args.out.dtype != DType::kBF16) return;
    if (call.plan.data().config->alignment == 1 || args.out.num_elements() == 0) return;
    *static_cast<std::byte*>(args.out.data) ^= std::byte{1};
  };
  const Found found = find_and_reduce(run_with({.sum = flip}, 600));
  EXPECT_THAT(found.failure.findings, Contains(HasSubstr("values differ; first")));
  EXPECT_EQ(found.reduced.ranks.size(), 2);
  EXPECT_EQ(num_tokens(found.reduced), 1);
  EXPECT_EQ(found.reduced.config.width, 1);
  EXPECT_GT(found.reduced.config.alignment, 1);
  EXPECT_THAT(found.reduced.dtype, AnyOf(DType::kBF16, DType::kF8E4M3));
}

TEST(RandomRun, FindsALostRoute) {
  const auto lose = [](const StrategyCall&, TensorView routes) {
    if (routes.num_elements() == 0) return;
    std::memset(routes.data, 0, static_cast<size_t>(size_of(routes.dtype)));
  };
  const Found found = find_and_reduce(run_with({.after_gather_routes = lose}, 200));
  EXPECT_THAT(found.failure.findings, Contains(HasSubstr("collect_routes")));
  EXPECT_EQ(num_tokens(found.reduced), 1);
  EXPECT_EQ(found.reduced.config.num_experts, 1);
}

// Rank 1 comes later than the deadline, which is long enough for a busy machine.
TEST(RandomRun, NamesTheCaseThatHangsAndGoesOn) {
  const auto stall = [](Strategy& inner, const StrategyCall& call, std::span<const RowPart> parts) {
    if (call.group.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(12));
    inner.scatter(call, parts);
  };
  RandomRun run = run_with({.scatter = stall}, kCasesPerBlock * 8);
  run.group = {.arrival_deadline = std::chrono::seconds(4),
               .progress_deadline = std::chrono::seconds(4)};
  run.most_failures = 2;
  const RandomResult result = run_random_on_threads(run);
  ASSERT_EQ(result.failures.size(), 2);
  EXPECT_LT(result.failures[0].number, result.failures[1].number);
  for (const RandomFailure& failure : result.failures) {
    EXPECT_EQ(failure.strategy, "direct");
    EXPECT_THAT(failure.findings, Contains(HasSubstr("rank 1")));
    EXPECT_THAT(failure.findings, Contains(AnyOf(HasSubstr("waited"), HasSubstr("gave up"))));
  }
}

// Runs as the processes of a job do, with threads in their place; the result of rank 0.
RandomResult run_as_processes(const RandomRun& run) {
  std::mutex mutex;
  std::map<int, std::vector<std::unique_ptr<Communicator>>> jobs;  // by ranks per node
  RandomResult result;
  run_ranks(run.most_ranks, [&](Group& group) {
    const auto connect = [&](int ranks_per_node) {
      const std::lock_guard lock(mutex);
      auto& job = jobs[ranks_per_node];
      if (job.empty()) {
        job = make_thread_communicators(run.most_ranks, {.ranks_per_node = ranks_per_node});
      }
      return std::move(job[static_cast<size_t>(group.rank())]);
    };
    RandomResult own = run_random_as_process(run, connect);
    if (group.rank() == 0) result = std::move(own);
  });
  return result;
}

TEST(RandomRun, GivesTheSameChecksumInOneJob) {
  RandomRun run = run_with({}, 5 * kCasesPerBlock + 3);
  run.candidates = built_in_strategies();
  const RandomResult result = run_as_processes(run);
  EXPECT_THAT(result.failures, IsEmpty());
  EXPECT_EQ(result.num_cases, run.count);
  EXPECT_EQ(result.checksum, run_random_on_threads(run).checksum);
}

TEST(RandomRun, GoesOnInOneJobAfterAHang) {
  const auto skip = [](Strategy& inner, const StrategyCall& call, std::span<const RowPart> parts) {
    if (call.group.rank() != 2 || call.plan.num_tokens() != 3) {
      inner.scatter(call, parts);
    }
  };
  RandomRun run = run_with({.scatter = skip}, 12 * kCasesPerBlock);
  run.most_failures = 1000;
  const RandomResult result = run_as_processes(run);
  EXPECT_EQ(result.num_cases, run.count);
  ASSERT_FALSE(result.failures.empty());
  EXPECT_LT(result.failures.size(), result.num_cases / 4);
  for (const RandomFailure& failure : result.failures) {
    EXPECT_EQ(make_random_case(run.seed, failure.number, run.most_ranks).num_ranks, 3);
  }
}

TEST(CaseWatchDeathTest, NamesTheCaseOfACrashOrAnEndlessLoop) {
  const auto begin = [](std::chrono::seconds limit) {
    static std::unique_ptr<CaseWatch> watch;
    watch = std::make_unique<CaseWatch>(
        CaseWatch::Advice{.seed = 7, .options = " --ranks 5 --communicator sockets"}, limit);
    watch->begin(3);
    watch->begin(12);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const char* words =
      "did not survive case 12; reproduce it with --random 1 --seed 7 --first 12 --ranks 5 "
      "--communicator sockets\n";
  EXPECT_EXIT(
      {
        begin(std::chrono::seconds(1000));
        std::abort();
      },
      ::testing::KilledBySignal(SIGABRT), words);
  EXPECT_EXIT(
      {
        begin(std::chrono::seconds(1));
        std::this_thread::sleep_for(std::chrono::seconds(600));
      },
      ::testing::ExitedWithCode(1), words);
}

// A rank that waits while others run cases without it.
TEST(CaseWatch, HasNoLimitBetweenCases) {
  CaseWatch watch({.seed = 7}, std::chrono::seconds(2));
  watch.begin(3);
  watch.pause();
  std::this_thread::sleep_for(std::chrono::seconds(5));
}

TEST(RandomRun, SaysInEveryProcessWhenItHasNoCase) {
  RandomRun run = run_with({}, 4 * kCasesPerBlock);
  std::atomic<int> num_idle{0};
  run.idle = [&] { ++num_idle; };
  run_as_processes(run);
  EXPECT_EQ(num_idle, 5 * run.most_ranks);  // before each block and after the last
}

TEST(RandomReport, ADifferenceBlamesNoCase) {
  std::vector<RandomReport> reports = {
      {.communicator = "threads", .seed = 7, .result = {.num_cases = 9, .checksum = 1}},
      {.communicator = "sockets", .seed = 7, .result = {.num_cases = 9, .checksum = 2}}};
  compare_checksums(reports);
  EXPECT_TRUE(reports[0].passed());
  EXPECT_FALSE(reports[1].passed());
  const std::string text = to_text(reports, {.width = 80});
  EXPECT_THAT(text, HasSubstr("the run of seed 7 (sockets) differs: its checksum is not that on "
                              "threads\n"));
  EXPECT_THAT(text, Not(HasSubstr("case 0")));
  const std::vector<RandomReport> again = parse_random_reports(to_json(reports));
  EXPECT_EQ(again[1].difference, reports[1].difference);
}

TEST(RandomRun, FilesHoldWholeWorlds) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const World world = testing::random_dispatch_world(seed, {.num_ranks = 3});
    const std::string text = to_json(DispatchCase{.strategy = "auto", .world = world});
    EXPECT_EQ(to_json(parse_dispatch_case(text)), text) << seed;
  }
}

TEST(RandomRun, SimplerWorldsAreValid) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    for (const World& world :
         testing::simpler_worlds(testing::random_dispatch_world(seed, {.num_ranks = 3}))) {
      const std::string text = to_json(DispatchCase{.strategy = "auto", .world = world});
      EXPECT_EQ(to_json(parse_dispatch_case(text)), text) << seed;
      EXPECT_NO_THROW(reference::lay_out(world.config, world.ranks, world.slots)) << seed;
    }
  }
}

TEST(RandomRun, FilesThatAreWrongAreRefused) {
  const World world = testing::random_dispatch_world(1, {.num_ranks = 2});
  const std::string text = to_json(DispatchCase{.strategy = "direct", .world = world});
  const auto refusal_of = [&](const std::string& from, const std::string& to) {
    std::string wrong = text;
    wrong.replace(wrong.find(from), from.size(), to);
    try {
      parse_dispatch_case(wrong);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refusal_of("\"ranks\": 2", "\"ranks\": 3"), HasSubstr("per_rank must have 3"));
  EXPECT_THAT(refusal_of("\"threads\"", "\"pigeons\""),
              HasSubstr("communicator must be \"threads\", \"sockets\" or \"mpi\""));
  EXPECT_THAT(refusal_of("\"chunks\"", "\"chunk\""), HasSubstr("unknown key \"chunk\""));
}

}  // namespace
}  // namespace crossdock::cli
