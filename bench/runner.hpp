#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/measure.hpp"
#include "bench/result.hpp"
#include "bench/scenario.hpp"
#include "bench/sweep.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// Selects what to measure; an empty list stands for everything that is possible.
struct Selection {
  std::vector<std::string> scenarios{};  // see find_scenarios
  std::vector<std::string> strategies{};
  std::vector<std::string> communicators{};  // "threads", "mpi", "sockets"; empty: without sockets
  Sizes sizes{};                             // instead of the scenario's
  std::optional<int> max_sms{};              // per rank on a GPU; not given: the scenario's
  Copies copies = Copies::kAuto;             // on a GPU
};

/// One combination to measure.
struct Case {
  Scenario scenario;
  std::string strategy;
  std::string communicator;
};

struct RunOptions {
  Repeats repeats{};
  bool check = true;
  int ranks_per_node = 0;  // for threads; 0: all on one node
  GroupOptions group{};    // the same
};

/// In the order of scenarios, communicators, strategies and sizes. Throws Error(kInvalidArgument)
/// for an unknown name, if nothing is selected, or more than kMaxRuns; Error(kUnsupported) for MPI
/// in builds without it.
std::vector<Case> select_cases(const Selection& selection);

/// Whether the ranks of the case are processes.
bool has_processes(const Case& one);

/// Runs a case whose ranks are not processes. Throws Error(kCapacity), before it starts, if there
/// is not enough memory, Error(kInternal) if a result is wrong.
Result run_case(const Case& one, const RunOptions& options);

/// The same for a case whose ranks are processes. Collective; the result is complete on rank 0
/// only.
Result run_case(const Case& one, Group& group, const RunOptions& options);

}  // namespace crossdock::bench
