#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "crossdock/build.hpp"
#include "crossdock/cuda.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

TEST(Command, PrintsItsVersion) {
  const CommandResult result = run_command("--version");
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out, "crossdock " + std::string(describe_build().version) + "\n");
}

TEST(Command, HelpsWithExamples) {
  for (const char* arguments : {"--help", "eval --help"}) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 0);
    EXPECT_THAT(result.out, HasSubstr("crossdock eval examples/cases/demo.json"));
    EXPECT_THAT(result.err, IsEmpty());
  }
}

TEST(Command, RejectsBadArgumentsWithStatusTwo) {
  expect_bad_arguments({
      {"", "a command is required"},
      {"frobnicate", "\"frobnicate\""},
      {"--frobnicate", "--frobnicate"},
      {"eval", "CASE is required"},
      {"eval --frob case.json", "--frob"},
      {"eval one.json two.json", "two.json"},
      {"info extra", "extra"},
  });
}

CommandResult run_on_three_processes(const std::string& arguments) {
  return run_program(std::string(CROSSDOCK_MPIRUN) +
                     " --allow-run-as-root --oversubscribe --mca btl_tcp_if_include lo"
                     " -np 3 " CROSSDOCK_COMMAND " " +
                     arguments);
}

bool has_mpirun() {
  return !std::string(CROSSDOCK_MPIRUN).empty();
}

TEST(Command, PrintsOnceUnderMpirunWhatOneProcessDoes) {
  if (!has_mpirun()) GTEST_SKIP() << "MPI is not in this build";
  for (const char* arguments : {"bench --list", "plan --model mixtral-8x7b --seq 128"}) {
    const CommandResult result = run_on_three_processes(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.out, run_command(arguments).out);
  }
}

// mpirun ends the job as soon as one process has failed; the words must be out by then.
TEST(Command, SaysOnceUnderMpirunWhatIsWrongWithItsArguments) {
  if (!has_mpirun()) GTEST_SKIP() << "MPI is not in this build";
  const std::vector<std::pair<const char*, const char*>> known = {
      {"frobnicate", "unknown command or option \"frobnicate\""},
      {"run --frob", "unknown option or argument \"--frob\""},
      {"run --ranks 2", "--ranks must be the number of processes, 3"},
      {"bench --scenario no-such", "scenario must be one of"},
      {"bench --communicator threads", "for threads run the command by itself"},
      {"verify --case no_such", "no check fits"},
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

TEST(Command, FailsWhereItsOutputCannotBeWritten) {
  const std::vector<std::string> known = {
      "--help",
      "info",
      "plan --model mixtral-8x7b --tokens 8",
      "run --tokens 4 --steps 1",
      std::string("eval ") + CROSSDOCK_SOURCE_DIR + "/examples/cases/worked.json",
      "verify --faults --list",
  };
  for (const std::string& arguments : known) {
    const CommandResult result = run_command(arguments + " > /dev/full");
    EXPECT_EQ(result.status, 1) << arguments;
    EXPECT_THAT(result.err, HasSubstr("cannot write to standard output")) << arguments;
  }
}

TEST(Info, SaysWhatWorksAndWhyNot) {
  const CommandResult result = run_command("info");
  EXPECT_EQ(result.status, 0);
  for (const char* word : {"threads", "mpi", "cuda", "alltoall", "cores"}) {
    EXPECT_THAT(result.out, HasSubstr(word));
  }
}

TEST(Info, PrintsJson) {
  const CommandResult result = run_command("info --json");
  EXPECT_EQ(result.status, 0);
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["version"], std::string(describe_build().version));
  EXPECT_EQ(json["parts"][0]["name"], "threads");
  EXPECT_EQ(json["parts"][0]["works"], true);
  EXPECT_GT(json["machine"]["cores"], 0);
  for (const auto& part : json["parts"]) {
    EXPECT_FALSE(part["note"].get<std::string>().empty());
    if (part["name"] != "cuda") continue;
    EXPECT_EQ(part["works"], cuda_device_count() > 0);
  }
}

}  // namespace
}  // namespace crossdock::cli
