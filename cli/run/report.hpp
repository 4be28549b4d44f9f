#pragma once

#include <string>

#include "cli/run/job.hpp"
#include "cli/run/rank.hpp"

namespace crossdock::cli {

/// For people; with colours if `colour`.
std::string to_text(const RunJob& job, const RunResult& result, bool colour);

std::string to_json(const RunJob& job, const RunResult& result);

}  // namespace crossdock::cli
