#pragma once

#include <string>
#include <vector>

#include "bench/result.hpp"
#include "bench/runner.hpp"
#include "bench/scenario.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {

std::string scenarios_text(const std::vector<bench::Scenario>& scenarios, const TextStyle& style);

/// The line above the results of a scenario.
std::string head_text(const bench::Scenario& scenario, const TextStyle& style);
/// "decode P4 T16 D2048 K8 E64 fp32, direct, threads"
std::string case_text(const bench::Case& one);
/// A table with one line per step.
std::string result_text(const bench::Result& result, const TextStyle& style);

/// How the ranks of a GPU run are connected: "1 GPU, whose memory is the wire", "8 GPUs, link 391.5
/// GB/s per GPU and direction".
std::string wire_text(const bench::Result& result);

/// "12.3", "4567".
std::string microseconds(double us);

}  // namespace crossdock::cli
