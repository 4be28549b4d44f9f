// Output of the command on terminals of different kinds and widths, and without a terminal.

#include "cli/terminal.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "cli/command.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr const char* kPlainEnvironment =
    "env -u COLUMNS -u NO_COLOR -u CLICOLOR_FORCE TERM=xterm-256color ";
constexpr const char* kRun =
    "run --width 24 --inner 16 --experts 10 --top-k 3 --tokens-total 53 --steps 2 --ranks 2 ";

// `settings`: "NAME=value ", set before those that all runs share.
Screen show(const std::string& arguments, const std::string& settings = "", int columns = 80) {
  return run_in_terminal(kPlainEnvironment + settings + CROSSDOCK_COMMAND " " + arguments, columns);
}

// Columns that the line takes; characters of bars and tables are one column wide.
int width_of(const std::string& line) {
  int width = 0;
  for (const char byte : line) width += (byte & 0xc0) != 0x80 ? 1 : 0;
  return width;
}

// Every kind of output of every command, with long names and large numbers.
std::vector<std::string> all_outputs() {
  const std::string trace = testing::TempDir() + "t.json";
  return {
      "--help",
      "--version",
      "run --help",
      "verify --help",
      "eval --help",
      "plan --help",
      "bench --help",
      "info --help",
      "info",
      "run --preset deepseek-v3 --scale 64 --tokens 16 --steps 1 --overlap 2",
      "run --width 8 --inner 8 --experts 300 --top-k 3 --tokens-total 4321 --steps 1 --ranks 9 "
      "--ranks-per-node 2 --strategy hierarchical --no-check --trace " +
          trace,
      "run --tokens 4 --steps 1 --forward-only",
      "plan --model deepseek-v3 --tokens 2000 --nodes 4 --zipf 1.5 --capacity 1.25",
      "plan --width 2 --experts 60000 --top-k 2 --tokens 100000000 --nodes 2 --fabric ethernet",
      "plan --model deepseek-v3 --tokens 1000000000",
      "plan --model qwen3-30b-a3b --seq 8192 --micro-batch 8 --nodes 2 --partial-sums",
      "plan --model deepseek-v3 --seq 8192 --micro-batch 8 --nodes 4 --partial-sums rows",
      "plan --model qwen3-30b-a3b --seq 8 --max-in-flight 70000 --queue-depth 1",
      "bench --list",
      "mesh --world 1024 --tp 8 --ep 64",
      "mesh --world 256 --ep 64 --rank 17",
      "help plan",
      "bench --scenario decode --repeat 1 --warm-up 0 --communicator threads --ranks 2",
      "bench --tokens 8:16:x2 --width 24,40 --repeat 1 --warm-up 0 --ranks 2",
      "bench --scenario nothing-of-this-name",
      "verify --list",
      "verify --communicator threads --ranks 1,2,3,4,5,6,7 --case vector",
      "verify --faults --list",
      std::string("verify --faults --strategy hierarchical --communicator threads") +
          " --case throws/before_dispatch",
      std::string("eval --check ") + CROSSDOCK_SOURCE_DIR +
          "/examples/cases/worked.json > /dev/null",
      "run --strategy nothing-of-this-name",
      "run --tokens 4 --tokens-total 4",
      "run --width 9223372036854775807",
      "frobnicate",
  };
}

TEST(Terminal, NoLineIsLongerThanEightyColumns) {
  for (const std::string& arguments : all_outputs()) {
    const Screen screen = show(arguments);
    EXPECT_FALSE(screen.lines.empty()) << arguments;
    for (const std::string& line : screen.lines) {
      EXPECT_LE(width_of(line), 80) << arguments << "\n" << line;
    }
    EXPECT_FALSE(screen.has_wrapped) << arguments;
  }
}

TEST(Terminal, ColumnsOverridesItsWidth) {
  for (const std::string& arguments : all_outputs()) {
    const CommandResult result = run_program(std::string(kPlainEnvironment) +
                                             "COLUMNS=80 " CROSSDOCK_COMMAND " " + arguments);
    std::istringstream text(result.out + result.err);
    for (std::string line; std::getline(text, line);) {
      EXPECT_LE(width_of(line), 80) << arguments << "\n" << line;
    }
  }
  const std::string arguments = "plan --model deepseek-v3 --tokens 64 --capacity 1.25";
  EXPECT_THAT(show(arguments, "COLUMNS=300 ", 80).text(),
              HasSubstr("routes are dropped (considered in the worst case only)"));
}

TEST(Terminal, WideOnesShowMore) {
  const std::string arguments =
      "bench --scenario decode --repeat 1 --warm-up 0 --communicator threads --ranks 2 "
      "--strategy direct";
  EXPECT_THAT(show(arguments, "", 80).text(), Not(HasSubstr("traffic us")));
  EXPECT_THAT(show(arguments, "", 160).text(), HasSubstr("traffic us"));
}

TEST(Terminal, ProgressIsCutToItsWidthAndVanishes) {
  const Screen screen = show(
      "verify --quick --case skewed --communicator threads --ranks 2 "
      "--strategy hierarchical",
      "", 60);
  EXPECT_THAT(screen.bytes, HasSubstr("\r\x1b[K1 of 9: hierarchical, 2 ranks"));
  EXPECT_THAT(screen.bytes, HasSubstr("..."));
  EXPECT_FALSE(screen.has_wrapped);
  EXPECT_THAT(screen.text(), Not(HasSubstr(" of ")));
  EXPECT_THAT(screen.text(), HasSubstr("all passed"));
}

// The position in all that was asked for, also while processes run.
TEST(Terminal, ProgressHasTheOverallPosition) {
  std::vector<std::string> communicators = {"threads", "sockets"};
  if (!std::string(CROSSDOCK_MPIRUN).empty()) communicators.emplace_back("mpi");
  for (const std::string& communicator : communicators) {
    const Screen verify = show(
        "verify --quick --case routing --ranks 1,2 --strategy direct "
        "--communicator " +
            communicator,
        "", 100);
    EXPECT_EQ(verify.status, 0) << verify.text();
    // A check of the second cell: its number is more than the checks of the first.
    EXPECT_THAT(verify.bytes,
                testing::ContainsRegex("\r\x1b\\[K[0-9]+ of [0-9]+.*: direct, 2 ranks "
                                       "\\(" +
                                       communicator + "\\)  [a-z]+"));
    const Screen run = show(std::string(kRun) + "--communicator " + communicator);
    EXPECT_THAT(run.bytes, testing::ContainsRegex("\r\x1b\\[K(creating parameters|step 1 of 2)"))
        << communicator;
    EXPECT_THAT(run.text(), Not(HasSubstr("creating")));
  }
}

TEST(Terminal, BlocksNeedAUtf8Locale) {
  const auto has_blocks = [](const std::string& settings) {
    const CommandResult result = run_program("env -u LC_ALL -u LC_CTYPE -u LANG " + settings +
                                             " " CROSSDOCK_COMMAND " " + kRun);
    EXPECT_EQ(result.status, 0);
    return std::ranges::any_of(result.out, [](char c) { return (c & 0x80) != 0; });
  };
  EXPECT_TRUE(has_blocks("LANG=C.UTF-8"));
  EXPECT_TRUE(has_blocks("LC_CTYPE=en_US.utf8 LANG=C"));
  EXPECT_FALSE(has_blocks("LC_ALL=C LANG=C.UTF-8"));
  EXPECT_FALSE(has_blocks(""));
}

TEST(Terminal, ShowsColours) {
  EXPECT_THAT(show(kRun).bytes, HasSubstr("\x1b[32mpassed\x1b[0m"));
}

TEST(Terminal, NoColorAndDumbTerminalsGetNoEscapeByte) {
  for (const char* settings : {"NO_COLOR=1 ", "TERM=dumb ", "NO_COLOR=1 CLICOLOR_FORCE=1 "}) {
    for (const char* arguments :
         {kRun, "info", "plan --model mixtral-8x7b --tokens 8", "--help",
          "verify --case vector --communicator threads --ranks 2", "bench --list"}) {
      const Screen screen = show(arguments, settings);
      EXPECT_EQ(screen.status, 0) << settings << arguments;
      EXPECT_THAT(screen.bytes, Not(HasSubstr("\x1b"))) << settings << arguments;
    }
  }
}

TEST(Terminal, OutputElsewhereHasColoursOnlyIfForced) {
  const std::string line = std::string(CROSSDOCK_COMMAND " ") + kRun;
  EXPECT_THAT(run_program(kPlainEnvironment + line).out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(run_program(std::string(kPlainEnvironment) + "CLICOLOR_FORCE=0 " + line).out,
              Not(HasSubstr("\x1b")));
  EXPECT_THAT(run_program(std::string(kPlainEnvironment) + "CLICOLOR_FORCE=1 " + line).out,
              HasSubstr("\x1b[32mpassed"));
}

TEST(Terminal, MpiRanksThatTheCommandStartsPrintInItsStyle) {
  if (std::string(CROSSDOCK_MPIRUN).empty()) GTEST_SKIP() << "MPI is not in this build";
  const std::string arguments = std::string(kRun) + "--communicator mpi";
  const Screen wide = show(arguments, "", 200);
  EXPECT_EQ(wide.status, 0) << wide.text();
  EXPECT_THAT(wide.bytes, HasSubstr("\x1b[32mpassed\x1b[0m"));
  EXPECT_THAT(wide.text(), HasSubstr("3 of 10 experts each, inner width 16\n"));
  EXPECT_THAT(show(arguments, "NO_COLOR=1 ").bytes, Not(HasSubstr("\x1b")));
  EXPECT_THAT(show(arguments, "TERM=dumb ").bytes, Not(HasSubstr("\x1b")));
  EXPECT_THAT(run_program(kPlainEnvironment + (CROSSDOCK_COMMAND " " + arguments)).out,
              Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace crossdock::cli
