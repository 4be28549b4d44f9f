#pragma once

#include <string>
#include <vector>

#include "cli/commands.hpp"

namespace crossdock::cli {

/// A parsed command line: help to print, a complaint, or the command to run with its arguments.
struct CommandLine {
  std::string command;    // "run", "verify", ...; empty if none was named
  std::string help;       // or the version, a man page, ...; printed instead of running the command
  std::string complaint;  // what is wrong with the arguments
  std::vector<std::string> words{};  // all arguments, without the program's name
  RunArgs run{};
  VerifyArgs verify{};
  EvalArgs eval{};
  PlanArgs plan{};
  MeshArgs mesh{};
  BenchArgs bench{};
  InfoArgs info{};

  bool wants_json() const;
};

CommandLine read_command_line(int argc, const char* const* argv);

}  // namespace crossdock::cli
