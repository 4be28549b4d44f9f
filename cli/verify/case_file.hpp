#pragma once

#include <string>

#include "crossdock/testing/random_worlds.hpp"

/// Case files with a "kind" (docs/case_format.md): every call is judged, as for random cases.
namespace crossdock::cli {

struct CaseFile {
  std::string strategy;                  // a name, or "auto"
  std::string communicator = "threads";  // or "sockets" or "mpi"
  std::string device = "cpu";            // or "cuda"
  testing::RandomCase one;
};

/// Throws Error(kInvalidArgument) if the case is not valid. New kinds are added here.
CaseFile parse_case_file(const std::string& text);

/// How it ended. `findings` are those of all ranks; empty: passed.
struct CaseReport {
  testing::Findings findings;
  uint64_t bits = 0;  // hash of the results

  bool passed() const { return findings.empty(); }
};

/// Runs a case with ranks as threads, or in processes of its own. `path` is the file that holds the
/// case, which these read.
CaseReport run_case_file(const CaseFile& file, const std::string& path);

/// Runs it as one rank of a job. Collective; the report is complete on rank 0.
CaseReport run_case_file_as_rank(const CaseFile& file, const std::string& job);

std::string to_json(const CaseReport& report);

/// The strategies that cases on this device choose from.
StrategyList candidates_on(const std::string& device);

/// Limits on waiting, so that a hang becomes a finding.
GroupOptions group_options_of_cases();

}  // namespace crossdock::cli
