#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/testing/random_worlds.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::cli {

struct RandomResult;

/// A run of random cases. Identical on every rank.
struct RandomRun {
  uint64_t seed = 0;
  int64_t first = 0;  // number of the first case
  int64_t count = 0;
  int most_ranks = 1;
  std::vector<std::string> strategies{};  // empty: all candidates, and sometimes "auto"
  StrategyList candidates = built_in_strategies();
  bool on_gpu = false;
  GroupOptions group{};   // of each case
  int most_failures = 3;  // the run ends after so many
  /// Called before each case, with its number and what has been found so far, once in each process
  /// that takes part in it.
  std::function<void(int64_t, const RandomResult&)> progress{};
  /// Called in each process when it has no case to run, for example as others run cases without it.
  std::function<void()> idle{};
};

struct RandomFailure {
  int64_t number = 0;
  std::string strategy;
  testing::Findings findings;
  std::string file{};  // the case file; empty: none was written
};

struct RandomResult {
  int64_t num_cases = 0;
  double seconds = 0;
  /// Of the results of all cases, whatever the communicator; layers on GPUs do not count.
  uint64_t checksum = 0;
  std::vector<RandomFailure> failures{};
};

/// With ranks as threads of this process, which are kept for a block of cases.
RandomResult run_random_on_threads(const RandomRun& run);

/// As one process of a job with run.most_ranks processes. `connect` makes a communicator of all of
/// them with this number of ranks per node; it is called by all at once. Collective; the result is
/// complete on rank 0.
using Connect = std::function<std::unique_ptr<Communicator>(int ranks_per_node)>;
RandomResult run_random_as_process(const RandomRun& run, const Connect& connect);

/// Runs one case on threads, with one strategy.
testing::CaseVerdict judge_on_threads(const RandomRun& run, const testing::RandomCase& one,
                                      const std::string& strategy);

}  // namespace crossdock::cli
