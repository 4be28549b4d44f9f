#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// How the command learns what ranks that it started do and why they have failed: they, and their
/// launcher, write reports to standard output, which the command reads. It tells the user once.
namespace crossdock::cli {

struct RankFailure {
  int rank = -1;          // -1: unknown
  int culprit = -1;       // the rank that the message blames; -1: none
  bool has_died = false;  // seen by the launcher
  std::string message;
};

/// What a rank is doing.
struct RankProgress {
  int64_t done = 0;  // of its work, in units that the command knows
  std::string words;
};

/// Whether the command has started this process as a rank and waits for its report.
bool is_rank_of_command();

/// Writes a report. Its launcher and the ranks of a job share one pipe.
void report_to_command(const RankFailure& failure);

void report_progress(const RankProgress& progress);

/// Removes reports of progress from the output so far and returns the last one, if there is one.
/// `searched`: how much of the output needs no further search; 0 at first.
std::optional<RankProgress> take_progress(std::string& output, size_t& searched);

/// Removes the reports of failures from the output of a job and returns them.
std::vector<RankFailure> take_reports(std::string& output);

/// Which rank has failed and why. REQUIRES: there is a failure.
std::string describe(const std::vector<RankFailure>& failures);

/// "was ended by signal 9 (Killed)", "ended with status 3"; `status` as from waitpid.
std::string describe_end(int status);

}  // namespace crossdock::cli
