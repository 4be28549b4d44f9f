#include "cli/command.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

namespace crossdock::cli {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

CommandResult run_program(const std::string& program, const std::string& input) {
  const std::string base = testing::TempDir() + "crossdock_cli_" + std::to_string(getpid());
  std::ofstream(base + ".in", std::ios::binary) << input;
  // Redirections come first, so the arguments may override them.
  const std::string line = "< " + base + ".in > " + base + ".out 2> " + base + ".err " + program;
  const int status = std::system(line.c_str());
  CommandResult result{WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(base + ".out"),
                       read_file(base + ".err")};
  for (const char* suffix : {".in", ".out", ".err"}) unlink((base + suffix).c_str());
  return result;
}

CommandResult run_command(const std::string& arguments, const std::string& input) {
  return run_program(std::string(CROSSDOCK_COMMAND) + " " + arguments, input);
}

void expect_bad_arguments(const std::vector<std::pair<std::string, std::string>>& known) {
  for (const auto& [arguments, words] : known) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_THAT(result.out, testing::IsEmpty()) << arguments;
    EXPECT_THAT(result.err, testing::HasSubstr(words)) << arguments;
    EXPECT_THAT(result.err, testing::HasSubstr("--help")) << arguments;
  }
}

std::string read_project_file(const std::string& path) {
  return read_file(std::string(CROSSDOCK_SOURCE_DIR) + "/" + path);
}

}  // namespace crossdock::cli
