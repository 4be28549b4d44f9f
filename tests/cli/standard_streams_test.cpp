// The command with standard input, output and error closed, or with output that cannot be written.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cli/command.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

class StandardStreams : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "mpi" && !mpi_is_built()) GTEST_SKIP() << "built without MPI";
  }

  static CommandResult run(const std::string& redirections) {
    return run_program(
        std::string("timeout 100 sh -c '") + CROSSDOCK_COMMAND +
        " run --tokens 4 --width 8 --inner 8 --experts 4 --top-k 2 --steps 1 --ranks 2 "
        "--communicator " +
        GetParam() + " " + redirections + "'");
  }
};

TEST_P(StandardStreams, MissingOutputIsReported) {
  for (const char* redirections : {">&-", "> /dev/full", "<&- >&-"}) {
    const CommandResult result = run(redirections);
    EXPECT_EQ(result.status, 1) << redirections;
    EXPECT_THAT(result.err, HasSubstr("cannot write to standard output")) << redirections;
  }
}

TEST_P(StandardStreams, AllMissingAreAFailure) {
  const CommandResult result = run("<&- >&- 2>&-");
  EXPECT_EQ(result.status, 1);
}

TEST_P(StandardStreams, MissingInputOrErrorsDoNotMatter) {
  for (const char* redirections : {"<&-", "2>&-", "<&- 2>&-"}) {
    const CommandResult result = run(redirections);
    EXPECT_EQ(result.status, 0) << redirections;
    EXPECT_THAT(result.out, HasSubstr("checksum")) << redirections;
    EXPECT_THAT(result.err, IsEmpty()) << redirections;
  }
}

INSTANTIATE_TEST_SUITE_P(Communicators, StandardStreams,
                         testing::Values("threads", "sockets", "mpi"));

}  // namespace
}  // namespace crossdock::cli
