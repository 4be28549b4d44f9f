#pragma once

#include <string>

#include "cli/run/job.hpp"
#include "cli/run/rank.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {

/// A report for people.
std::string to_text(const RunJob& job, const RunResult& result, const TextStyle& style);

std::string to_json(const RunJob& job, const RunResult& result);

}  // namespace crossdock::cli
