#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/measure.hpp"
#include "bench/result.hpp"
#include "bench/scenario.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// What the user wants measured; an empty list stands for all that fit.
struct Selection {
  std::vector<std::string> scenarios{};  // see find_scenarios
  std::vector<std::string> strategies{};
  std::vector<std::string> communicators{};  // "threads", "mpi"
  int ranks = 0;                             // instead of the scenario's own; 0: its own
  std::optional<int> max_sms{};              // of each rank on a GPU, instead of the scenario's
};

/// One line of the result.
struct Case {
  Scenario scenario;
  std::string strategy;
  std::string communicator;
};

struct RunOptions {
  Repeats repeats{};
  bool check = true;
  int ranks_per_node = 0;  // of thread ranks; 0: all on one node
};

/// Throws Error(kInvalidArgument) for a name that is unknown, and if nothing is left;
/// Error(kUnsupported) for MPI where it is not built in.
std::vector<Case> select_cases(const Selection& selection);

/// Runs a case whose communicator is not "mpi". Throws Error(kCapacity) before it begins if memory
/// does not suffice, Error(kInternal) if a result is wrong.
Result run_case(const Case& one, const RunOptions& options);

/// The same for "mpi", by every rank of the group. Complete on rank 0.
Result run_case(const Case& one, Group& group, const RunOptions& options);

}  // namespace crossdock::bench
