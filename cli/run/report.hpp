#pragma once

#include <string>

#include "cli/origin.hpp"
#include "cli/run/job.hpp"
#include "cli/run/rank.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {

/// A report for people.
std::string to_text(const RunJob& job, const RunResult& result, const TextStyle& style);

/// With this version of the format, which grows when a key disappears or changes its meaning.
constexpr int kRunSchema = 1;
std::string to_json(const RunJob& job, const RunResult& result, const Origin& origin);

}  // namespace crossdock::cli
