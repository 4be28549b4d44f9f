#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/commands.hpp"
#include "cli/origin.hpp"

namespace crossdock::cli {

/// What a reader of results needs to know.
struct RunDescription {
  Origin origin{};
  std::string gpu{};     // empty: no run uses one
  int num_gpus = 0;      // in the machine
  std::string driver{};  // of the GPU; empty: unknown
  int samples = 0;       // timed repetitions of every step
  int warm_up = 0;       // repetitions before them
  bool checked = false;
};

/// Describes a run that begins now.
RunDescription describe_run(const BenchArgs& args, bool uses_gpu);

/// Names and values to print, without unknown ones.
std::vector<std::pair<std::string, std::string>> facts_of(const RunDescription& run);

Json json_of(const RunDescription& run);

}  // namespace crossdock::cli
