#include "cli/verify/random_run.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "cli/verify/random_cases.hpp"

namespace crossdock::cli {
namespace {

using testing::CaseVerdict;
using testing::RandomCase;
using Clock = std::chrono::steady_clock;

constexpr int64_t kAutoOneIn = 4;

std::vector<std::string> strategies_of(const RandomRun& run, int64_t number) {
  if (!run.strategies.empty()) return run.strategies;
  std::vector<std::string> names = run.candidates.names();
  if (number % kAutoOneIn == 0) names.emplace_back("auto");
  return names;
}

int64_t end_of(const RandomRun& run) {
  return run.first + run.count;
}

// The first number after the block.
int64_t end_of_block(const RandomRun& run, int64_t number) {
  return std::min(end_of(run), (number / kCasesPerBlock + 1) * kCasesPerBlock);
}

// Adds the verdict on case `number` to a result. The sum does not depend on the order.
void record(int64_t number, const CaseVerdict& verdict, RandomResult& result) {
  ++result.num_cases;
  if (verdict.passed()) {
    if (verdict.bits == 0) return;
    testing::RandomNumbers mix(verdict.bits + static_cast<uint64_t>(number));
    result.checksum += mix.next();
    return;
  }
  result.failures.push_back({number, verdict.strategy, verdict.findings});
}

// Makes the cases of a run. Ranks that are threads share one, and with it the expected results of a
// layer: they run the same case at the same time.
class Cases {
 public:
  explicit Cases(const RandomRun& run) : run_(run) {}

  RandomCase at(int64_t number) {
    const std::lock_guard lock(mutex_);
    if (number_ != number) {
      latest_ = make_random_case(run_.seed, number, run_.most_ranks, run_.on_gpu);
      number_ = number;
    }
    return latest_;
  }

 private:
  const RandomRun& run_;
  std::mutex mutex_;
  int64_t number_ = -1;
  RandomCase latest_;
};

// Runs the cases until `end` or the first failure; returns the number after the last. The first
// rank of each process reports progress.
int64_t run_cases(Group& group, const RandomRun& run, Cases& cases, int64_t number, int64_t end,
                  RandomResult& result) {
  const bool speaks = group.rank() == 0;
  const bool reports = speaks || group.communicator().name() != "threads";
  while (number < end) {
    if (reports && run.progress) run.progress(number, result);
    const RandomCase one = cases.at(number);
    const CaseVerdict verdict =
        testing::judge_case(group, one, strategies_of(run, number), run.candidates, run.on_gpu);
    if (speaks) record(number, verdict, result);
    ++number;
    if (!verdict.passed()) break;
  }
  return number;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The groups of one process of a job: all processes, with some number of ranks per node, and the
// first few of them.
class ProcessGroups {
 public:
  ProcessGroups(const RandomRun& run, const Connect& connect)
      : options_(run.group), connect_(connect) {}

  // All processes. Collective.
  Group& all(int ranks_per_node) {
    std::unique_ptr<Group>& group = all_[ranks_per_node];
    if (!group) {
      GroupOptions options = options_;
      // Processes without cases wait for a whole block of them.
      if (options.arrival_deadline) *options.arrival_deadline *= kCasesPerBlock;
      group = std::make_unique<Group>(connect_(ranks_per_node), options);
    }
    return *group;
  }

  // Collective over the first ranks.
  Group& first(int num_ranks, int ranks_per_node) {
    std::unique_ptr<Group>& group = first_[{num_ranks, ranks_per_node}];
    if (!group) {
      Communicator& whole = all(ranks_per_node).communicator();
      group = std::make_unique<Group>(whole.subgroup(first_ranks(num_ranks)), options_);
    }
    return *group;
  }
  void forget(int num_ranks, int ranks_per_node) { first_.erase({num_ranks, ranks_per_node}); }

 private:
  GroupOptions options_;  // of groups for cases
  const Connect& connect_;
  std::map<int, std::unique_ptr<Group>> all_;
  std::map<std::pair<int, int>, std::unique_ptr<Group>> first_;
};

}  // namespace

RandomResult run_random_on_threads(const RandomRun& run) {
  const Clock::time_point begin = Clock::now();
  RandomResult result;
  Cases cases(run);
  for (int64_t number = run.first; number < end_of(run);) {
    const int64_t end = end_of_block(run, number);
    const BlockShape shape = shape_of_block(run.seed, number, run.most_ranks);
    int64_t next = number;
    run_ranks(shape.num_ranks,
              [&](Group& group) {
                const int64_t stopped = run_cases(group, run, cases, number, end, result);
                if (group.rank() == 0) next = stopped;
              },
              {.ranks_per_node = shape.ranks_per_node, .group = run.group});
    number = next;
    if (std::ssize(result.failures) >= run.most_failures) break;
  }
  result.seconds = seconds_since(begin);
  return result;
}

RandomResult run_random_as_process(const RandomRun& run, const Connect& connect) {
  const Clock::time_point begin = Clock::now();
  RandomResult result;
  Cases cases(run);
  ProcessGroups groups(run, connect);
  for (int64_t block = run.first; block < end_of(run); block = end_of_block(run, block)) {
    const BlockShape shape = shape_of_block(run.seed, block, run.most_ranks);
    Group& all = groups.all(shape.ranks_per_node);
    if (run.idle) run.idle();
    // Processes without cases wait here, until rank 0 says that the run goes on.
    const std::array<int64_t, 1> failures = {std::ssize(result.failures)};
    const Agreement start =
        all.agree({.operation = "random block", .body = std::as_bytes(std::span(failures))});
    int64_t failures_so_far = 0;
    std::memcpy(&failures_so_far, start.body(0).data(), sizeof(failures_so_far));
    if (failures_so_far >= run.most_failures) break;
    if (all.rank() >= shape.num_ranks) continue;
    const int64_t end = end_of_block(run, block);
    for (int64_t number = block; number < end;) {
      Group& group = groups.first(shape.num_ranks, shape.ranks_per_node);
      number = run_cases(group, run, cases, number, end, result);
      if (group.is_poisoned()) groups.forget(shape.num_ranks, shape.ranks_per_node);
    }
  }
  if (run.idle) run.idle();
  result.seconds = seconds_since(begin);
  return result;
}

CaseVerdict judge_on_threads(const RandomRun& run, const RandomCase& one,
                             const std::string& strategy) {
  CaseVerdict verdict;
  run_ranks(one.num_ranks,
            [&](Group& group) {
              CaseVerdict own =
                  testing::judge_case(group, one, {strategy}, run.candidates, run.on_gpu);
              if (group.rank() == 0) verdict = std::move(own);
            },
            {.ranks_per_node = one.ranks_per_node, .group = run.group});
  return verdict;
}

}  // namespace crossdock::cli
