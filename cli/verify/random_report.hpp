#pragma once

#include <string>
#include <vector>

#include "cli/text/terminal.hpp"
#include "cli/verify/random_run.hpp"

namespace crossdock::cli {

/// A run of random cases on one communicator.
struct RandomReport {
  std::string communicator;
  std::string device = "cpu";
  int ranks = 0;
  uint64_t seed = 0;
  RandomResult result{};
  std::string difference{};  // of the whole run from another; empty: there is none

  bool passed() const { return result.failures.empty() && difference.empty(); }
};

/// The same cases must have the same checksum on every communicator. Sets `difference` where they
/// have not, although they passed.
void compare_checksums(std::vector<RandomReport>& reports);

/// Failures, then one line for each report.
std::string to_text(const std::vector<RandomReport>& reports, const TextStyle& style);

std::string to_json(const std::vector<RandomReport>& reports);

/// The inverse of to_json. Throws Error(kInternal).
std::vector<RandomReport> parse_random_reports(const std::string& text);

}  // namespace crossdock::cli
