#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "bench/result.hpp"
#include "bench/scenario.hpp"

namespace crossdock::cli {

void print_scenarios(std::ostream& out, const std::vector<bench::Scenario>& scenarios);
std::string to_json(const std::vector<bench::Scenario>& scenarios);

/// The line above the results of a scenario and the head of their table.
void print_head(std::ostream& out, const bench::Scenario& scenario);
/// One line per step.
void print_result(std::ostream& out, const bench::Result& result);

std::string to_json(const std::vector<bench::Result>& results);
/// The inverse of to_json.
std::vector<bench::Result> parse_results(const std::string& json);

}  // namespace crossdock::cli
