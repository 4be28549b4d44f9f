#pragma once

#include <string>
#include <vector>

#include "bench/result.hpp"
#include "bench/scenario.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {

std::string scenarios_text(const std::vector<bench::Scenario>& scenarios, const TextStyle& style);
std::string to_json(const std::vector<bench::Scenario>& scenarios);

/// The line above the results of a scenario.
std::string head_text(const bench::Scenario& scenario, const TextStyle& style);
/// A table with one line per step.
std::string result_text(const bench::Result& result, const TextStyle& style);

std::string to_json(const std::vector<bench::Result>& results);
/// The inverse of to_json. Throws Error(kInternal).
std::vector<bench::Result> parse_results(const std::string& json);

}  // namespace crossdock::cli
