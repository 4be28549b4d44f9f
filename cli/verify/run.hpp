#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/testing/conformance.hpp"

namespace crossdock::cli {

/// One cell of the matrix: a strategy, a communicator and a number of ranks.
struct VerifyCell {
  std::string strategy;
  std::string communicator;  // "threads", "mpi" or "sockets"
  int ranks = 0;
  int ranks_per_node = 0;      // 0: as the communicator reports
  std::string device = "cpu";  // or "cuda"
};

struct VerifyResult {
  VerifyCell cell;
  int64_t num_selected = 0;  // checks to run
  int64_t num_checks = 0;    // checks that ran; fewer after a failure that broke the group
  double seconds = 0;
  std::vector<conformance::Failure> failures;  // of all ranks

  bool passed() const { return failures.empty() && num_checks == num_selected; }
};

/// Selects checks; empty lists select all.
struct CheckFilter {
  std::vector<std::string> names;   // parts of names, or patterns with * and ?
  std::vector<std::string> dtypes;  // only checks of these
  bool is_quick = false;            // only quick checks
};

/// `device`, "cpu" or "cuda": where dispatchers and layers get their tensors.
std::vector<conformance::Check> select_checks(const CheckFilter& filter, const std::string& device);

/// Whether the name contains `pattern`, or matches it as a pattern with * and ?.
bool matches(const std::string& name, const std::string& pattern);

/// Called by rank 0 before each check, with its number.
using CheckProgress = std::function<void(int64_t, const conformance::Check&)>;

/// Runs the checks as one rank of a group. Collective; the result is complete on rank 0 only.
VerifyResult verify_on(Group& group, const VerifyCell& cell,
                       const std::vector<conformance::Check>& checks,
                       const CheckProgress& progress);

/// Runs the checks with ranks as threads of this process.
VerifyResult verify_on_threads(const VerifyCell& cell,
                               const std::vector<conformance::Check>& checks,
                               const CheckProgress& progress);

}  // namespace crossdock::cli
