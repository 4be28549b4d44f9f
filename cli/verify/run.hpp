#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/testing/conformance.hpp"

namespace crossdock::cli {

/// One cell of the matrix: a strategy on an engine with so many ranks.
struct VerifyCell {
  std::string strategy;
  std::string communicator;  // "threads" or "mpi"
  int ranks = 0;
  int ranks_per_node = 0;  // 0: as the engine reports
};

struct VerifyResult {
  VerifyCell cell;
  int64_t num_selected = 0;  // checks that were to run
  int64_t num_checks = 0;    // that did; fewer after a failure that broke the group
  double seconds = 0;
  std::vector<conformance::Failure> failures;  // of all ranks

  bool passed() const { return failures.empty() && num_checks == num_selected; }
};

/// Which checks; empty: all.
struct CheckFilter {
  std::vector<std::string> names;   // parts of names, or patterns with * and ?
  std::vector<std::string> dtypes;  // checks of these alone
  bool is_quick = false;            // the short run
};

std::vector<conformance::Check> select_checks(const CheckFilter& filter);

/// Whether `pattern` is a part of the name, or a pattern with * and ? that the whole name follows.
bool fits(const std::string& name, const std::string& pattern);

/// Called before each check by rank 0, with its number.
using CheckProgress = std::function<void(int64_t, const conformance::Check&)>;

/// Runs the checks as one rank of a group. Collective; the result is whole on rank 0.
VerifyResult verify_on(Group& group, const VerifyCell& cell,
                       const std::vector<conformance::Check>& checks,
                       const CheckProgress& progress);

/// Runs the checks on ranks that are threads of this process.
VerifyResult verify_on_threads(const VerifyCell& cell,
                               const std::vector<conformance::Check>& checks,
                               const CheckProgress& progress);

}  // namespace crossdock::cli
