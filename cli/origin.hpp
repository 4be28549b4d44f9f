#pragma once

#include <string>
#include <vector>

#include "cli/json.hpp"

namespace crossdock::cli {

/// Where results come from: what a reader needs to know to judge them, or to repeat the run.
struct Origin {
  std::string version;  // of crossdock, with the revision if known
  std::string build;    // "Release build by GNU 12.2.0"
  std::string host;
  int num_cores = 0;
  int num_usable_cores = 0;
  std::string time;     // when the run began: "2026-11-16T19:52:39+00:00"
  std::string command;  // as a shell reads it
};

/// Of a run that begins now. `words`: the command line, without the program's name.
Origin describe_origin(const std::vector<std::string>& words);

Json json_of(const Origin& origin);

}  // namespace crossdock::cli
