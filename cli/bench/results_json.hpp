#pragma once

#include <string>
#include <vector>

#include "bench/result.hpp"
#include "bench/scenario.hpp"
#include "cli/json.hpp"

namespace crossdock::cli {

std::string to_json(const std::vector<bench::Scenario>& scenarios);

Json json_of(const std::vector<bench::Result>& results);
std::string to_json(const std::vector<bench::Result>& results);
/// The inverse of to_json. Throws Error(kInternal).
std::vector<bench::Result> parse_results(const std::string& text);

}  // namespace crossdock::cli
