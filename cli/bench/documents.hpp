#pragma once

#include <string>
#include <vector>

#include "bench/result.hpp"
#include "cli/bench/run_description.hpp"
#include "cli/text/terminal.hpp"

/// Results as documents that describe the run they come from. The head of a document and its
/// results are separate if results can be printed as they become available.
namespace crossdock::cli {

/// Lines above the tables.
std::string description_text(const RunDescription& run, const TextStyle& style);

/// Comments, which begin with #, and the line of titles.
std::string csv_head(const RunDescription& run);
/// One line per step.
std::string csv_lines(const bench::Result& result);

/// A list of facts, then one table per scenario, strategy and communicator: a line per size if
/// `is_sweep`, else a line per step.
std::string to_markdown(const RunDescription& run, const std::vector<bench::Result>& results,
                        bool is_sweep);

/// {"run": ..., "results": as in report.hpp}
std::string to_json(const RunDescription& run, const std::vector<bench::Result>& results);

}  // namespace crossdock::cli
