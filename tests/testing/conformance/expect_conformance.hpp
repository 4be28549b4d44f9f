#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "crossdock/testing/conformance.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::conformance {

/// Recorded once; changes only if the tokens and routes of output_hash do.
inline constexpr uint64_t kKnownOutputHash = 5142801531108618914U;

/// Long enough for many ranks on few cores, short enough that nothing hangs.
inline GroupOptions test_deadlines() {
  return {.arrival_deadline = std::chrono::seconds(60),
          .progress_deadline = std::chrono::seconds(60)};
}

/// The checks of the short run.
inline std::vector<Check> quick_checks() {
  std::vector<Check> checks = list_checks();
  std::erase_if(checks, [](const Check& check) { return !check.is_quick; });
  return checks;
}

inline void expect_no_failures(const std::vector<Failure>& failures) {
  constexpr size_t kShown = 20;
  for (size_t i = 0; i < std::min(failures.size(), kShown); ++i) {
    ADD_FAILURE() << failures[i].check << ": " << failures[i].message;
  }
  EXPECT_EQ(failures.size(), 0U);
}

/// Ranks that are threads.
struct Ranks {
  int size = 1;
  int per_node = 0;  // 0: all on one node
};

using StrategyAndRanks = std::tuple<std::string, Ranks>;

/// "direct_4_ranks_2_per_node"
inline std::string name_of_case(const ::testing::TestParamInfo<StrategyAndRanks>& info) {
  const auto& [name, ranks] = info.param;
  std::ostringstream text;
  text << name << "_" << ranks.size << "_ranks";
  if (ranks.per_node > 0) text << "_" << ranks.per_node << "_per_node";
  return text.str();
}

/// Called on each rank before anything else.
using PrepareGroup = std::function<void(Group&)>;

/// Runs the checks on thread ranks; returns the failures of all ranks.
inline std::vector<Failure> failures_on_threads(const Ranks& ranks, const StrategyFactory& strategy,
                                                const std::vector<Check>& checks,
                                                const PrepareGroup& prepare = {}) {
  std::mutex mutex;
  std::vector<Failure> failures;
  const auto body = [&](Group& group) {
    if (prepare) prepare(group);
    const Report report = run_checks(group, strategy, checks);
    const std::lock_guard lock(mutex);
    failures.insert(failures.end(), report.failures.begin(), report.failures.end());
  };
  run_ranks(ranks.size, body, {.ranks_per_node = ranks.per_node, .group = test_deadlines()});
  return failures;
}

/// Expects the known output on all thread ranks.
inline void expect_known_bits(const Ranks& ranks, const StrategyFactory& strategy,
                              const PrepareGroup& prepare = {}) {
  std::vector<uint64_t> hashes(static_cast<size_t>(ranks.size));
  const auto body = [&](Group& group) {
    if (prepare) prepare(group);
    hashes[static_cast<size_t>(group.rank())] = output_hash(group, strategy);
  };
  run_ranks(ranks.size, body, {.ranks_per_node = ranks.per_node, .group = test_deadlines()});
  EXPECT_EQ(hashes, std::vector<uint64_t>(hashes.size(), kKnownOutputHash));
}

}  // namespace crossdock::conformance
