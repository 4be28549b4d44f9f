// The command under an mpirun that the user started.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cli/command.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

CommandResult run_on_three_processes(const std::string& arguments) {
  return run_program(std::string(CROSSDOCK_MPIRUN) +
                     " --allow-run-as-root --oversubscribe --mca btl_tcp_if_include lo"
                     " -np 3 " CROSSDOCK_COMMAND " " +
                     arguments);
}

bool has_mpirun() {
  return !std::string(CROSSDOCK_MPIRUN).empty();
}

TEST(UnderMpirun, PrintsOnceWhatOneProcessDoes) {
  if (!has_mpirun()) GTEST_SKIP() << "MPI is not in this build";
  for (const char* arguments : {"bench --list", "plan --model mixtral-8x7b --seq 128"}) {
    const CommandResult result = run_on_three_processes(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.out, run_command(arguments).out);
  }
}

// mpirun ends the job as soon as one process fails; the message must be printed before that.
TEST(UnderMpirun, SaysOnceWhatIsWrongWithItsArguments) {
  if (!has_mpirun()) GTEST_SKIP() << "MPI is not in this build";
  const std::vector<std::pair<const char*, const char*>> known = {
      {"frobnicate", "unknown command or option \"frobnicate\""},
      {"run --frob", "unknown option or argument \"--frob\""},
      {"run --ranks 2", "--ranks must be the number of processes, 3"},
      {"bench --scenario no-such", "scenario must be one of"},
      {"bench --communicator threads", "for threads, run the command without mpirun"},
      {"verify --case no_such", "no check matches"},
      {"verify --ranks 2", "--ranks must be the number of processes, 3"},
  };
  for (const auto& [arguments, words] : known) {
    const CommandResult result = run_on_three_processes(arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_THAT(result.out, IsEmpty()) << arguments;
    const size_t first = result.err.find(words);
    ASSERT_NE(first, std::string::npos) << arguments << "\n" << result.err;
    EXPECT_EQ(result.err.find(words, first + 1), std::string::npos) << result.err;
  }
}

TEST(UnderMpirun, RefusesDifferentArgumentsOfTheProcessesOfAJob) {
  if (!has_mpirun()) GTEST_SKIP() << "MPI is not in this build";
  const std::vector<std::pair<const char*, const char*>> known = {
      {"run --tokens 4", "run --tokens 8"},
      {"run --tokens 4 --steps 1", "run --tokens 4 --steps 2"},
      {"run --tokens 4", "verify --quick"},
      {"run --tokens 4", "run --tokens 4 --frob"},
  };
  for (const auto& [first, second] : known) {
    const CommandResult result = run_program(
        std::string(CROSSDOCK_MPIRUN) +
        " --allow-run-as-root --oversubscribe --mca btl_tcp_if_include lo -np 1 " CROSSDOCK_COMMAND
        " " +
        first + " : -np 1 " CROSSDOCK_COMMAND " " + second);
    EXPECT_EQ(result.status, 2) << second;
    EXPECT_THAT(result.out, IsEmpty()) << second;
    EXPECT_THAT(result.err, HasSubstr("must have the same arguments; rank 0 has `crossdock " +
                                      std::string(first) + "`, rank 1 has `crossdock " + second));
  }
}

}  // namespace
}  // namespace crossdock::cli
