#pragma once

#include <string>
#include <vector>

#include "cli/commands.hpp"

namespace crossdock::cli {

/// What was typed after `crossdock`: help to print, or a complaint, or else the command to run with
/// its arguments.
struct CommandLine {
  std::string command;               // "run", "verify", ...; empty if none was named
  std::string help;                  // or version; printed in place of running the command
  std::string complaint;             // what is wrong with the arguments
  std::vector<std::string> words{};  // all of them, without the program
  RunArgs run{};
  VerifyArgs verify{};
  EvalArgs eval{};
  PlanArgs plan{};
  BenchArgs bench{};
  InfoArgs info{};

  bool wants_json() const;
};

CommandLine read_command_line(int argc, const char* const* argv);

}  // namespace crossdock::cli
