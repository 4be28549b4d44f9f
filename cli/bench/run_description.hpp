#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/commands.hpp"

namespace crossdock::cli {

class JsonWriter;

/// What a reader needs to know to judge the results of a run, or to repeat it.
struct RunDescription {
  std::string version;  // of crossdock, with the revision if known
  std::string build;    // "Release build by GNU 12.2.0"
  std::string host;
  int num_cores = 0;
  int num_usable_cores = 0;
  std::string gpu{};     // empty: no run uses one
  int num_gpus = 0;      // in the machine
  std::string driver{};  // of the GPU; empty: unknown
  std::string time;      // when the run began: "2026-11-16T19:52:39+00:00"
  std::string command;   // as a shell reads it
  int samples = 0;       // timed repetitions of every step
  int warm_up = 0;       // repetitions before them
  bool checked = false;
};

/// Describes a run that begins now.
RunDescription describe_run(const BenchArgs& args, bool uses_gpu);

/// Names and values to print, without unknown ones.
std::vector<std::pair<std::string, std::string>> facts_of(const RunDescription& run);

void write_json(JsonWriter& writer, const RunDescription& run);

}  // namespace crossdock::cli
