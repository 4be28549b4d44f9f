#pragma once

#include <string>
#include <vector>

#include "bench/result.hpp"
#include "bench/scenario.hpp"

namespace crossdock::cli {

class JsonWriter;

std::string to_json(const std::vector<bench::Scenario>& scenarios);

std::string to_json(const std::vector<bench::Result>& results);
void write_json(JsonWriter& writer, const std::vector<bench::Result>& results);
/// The inverse of to_json. Throws Error(kInternal).
std::vector<bench::Result> parse_results(const std::string& json);

}  // namespace crossdock::cli
