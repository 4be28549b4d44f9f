#pragma once

#include <string>
#include <utility>
#include <vector>

namespace crossdock::cli {

struct CommandResult {
  int status = -1;  // exit status; -1 if a signal ended it
  std::string out;
  std::string err;
};

/// Runs the command `crossdock` with these arguments (as a shell reads them) and this standard
/// input.
CommandResult run_command(const std::string& arguments, const std::string& input = "");

/// Runs any command line.
CommandResult run_program(const std::string& line, const std::string& input = "");

/// The command must refuse each of these arguments: with status 2, nothing on standard output, and
/// the given words on standard error.
void expect_bad_arguments(const std::vector<std::pair<std::string, std::string>>& known);

/// The bytes of a file, which must exist.
std::string read_file(const std::string& path);

/// The text of a file of the project, by its path from the root.
std::string read_project_file(const std::string& path);

}  // namespace crossdock::cli
