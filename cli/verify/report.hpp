#pragma once

#include <string>
#include <vector>

#include "cli/text/terminal.hpp"
#include "cli/verify/run.hpp"

namespace crossdock::cli {

/// A table with a line per communicator and number of ranks and a column per strategy, then the
/// failures.
/// `seconds`: that all took together, with the start of processes.
std::string to_text(const std::vector<VerifyResult>& results, double seconds,
                    const TextStyle& style);

std::string to_json(const std::vector<VerifyResult>& results);

/// The inverse of to_json. Throws Error(kInternal).
std::vector<VerifyResult> parse_verify_results(const std::string& text);

}  // namespace crossdock::cli
