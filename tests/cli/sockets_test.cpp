// Ranks as processes of communicator sockets: started by the command itself, or by a launcher that
// names each process's rank in its environment.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/command.hpp"
#include "cli/processes/free_port.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kSmallRun =
    "run --json --steps 1 --width 24 --inner 16 --experts 10 --top-k 3 --tokens-total 203 ";

json run_json(const std::string& arguments) {
  const CommandResult result = run_command(arguments);
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  return json::parse(result.out, nullptr, /*allow_exceptions=*/false);
}

// One process per argument list, with the variables that torchrun sets.
CommandResult run_job(const std::vector<std::string>& arguments) {
  std::string script = "status=0; ";
  for (size_t rank = 0; rank < arguments.size(); ++rank) {
    script += "RANK=" + std::to_string(rank) + " " CROSSDOCK_COMMAND " " + arguments[rank] +
              " & pids=\"$pids $!\"; ";
  }
  script += "for pid in $pids; do wait $pid || status=$?; done; exit $status";
  return run_program("env WORLD_SIZE=" + std::to_string(arguments.size()) +
                     " MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(find_free_port()) +
                     " CROSSDOCK_JOB=" + std::to_string(getpid()) + " timeout 300 sh -c '" +
                     script + "'");
}

CommandResult run_job(int size, const std::string& arguments) {
  return run_job(std::vector<std::string>(static_cast<size_t>(size), arguments));
}

TEST(SocketsRun, GivesTheBitsOfThreads) {
  const std::string run = kSmallRun;
  const json threads = run_json(run + "--ranks 1");
  for (const char* arguments :
       {"--ranks 4", "--ranks 4 --ranks-per-node 2", "--ranks 3 --overlap 2"}) {
    const json sockets = run_json(run + "--communicator sockets " + arguments);
    EXPECT_EQ(sockets["communicator"], "sockets");
    EXPECT_EQ(sockets["check"]["passed"], true);
    EXPECT_EQ(sockets["checksum"], threads["checksum"]) << arguments;
    EXPECT_EQ(sockets["grad_checksum"], threads["grad_checksum"]) << arguments;
  }
}

TEST(SocketsRun, WritesATrace) {
  const std::string file = testing::TempDir() + "sockets_trace_" + std::to_string(getpid());
  run_json(std::string(kSmallRun) + "--communicator sockets --ranks 2 --trace " + file);
  EXPECT_TRUE(std::filesystem::exists(file));
  std::filesystem::remove(file);
}

TEST(SocketsRun, ReportsAnImpossibleJobOnce) {
  const CommandResult result =
      run_command("run --communicator sockets --ranks 2 --trace /no/such/folder/trace.json");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("/no/such/folder"));
}

// In a job whose other ranks never start.
TEST(SocketsHelp, NeedsNoOtherRank) {
  for (const char* arguments : {"--version", "-V", "--help", "help run", "version", "run --help",
                                "completion bash", "man run"}) {
    const CommandResult alone = run_command(arguments);
    for (const char* rank : {"0", "1", "7"}) {
      const CommandResult result = run_program(
          "env WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 RANK=" + std::string(rank) + " " +
          CROSSDOCK_COMMAND + " " + arguments);
      EXPECT_EQ(result.status, 0) << arguments << result.err;
      EXPECT_EQ(result.out, alone.out) << arguments << ", rank " << rank;
    }
  }
}

TEST(SocketsVerify, StartsItsRanksItself) {
  const json verified =
      run_json("verify --communicator sockets --strategy direct --ranks 1,2 --case vector --json");
  ASSERT_EQ(verified["results"].size(), 2);
  EXPECT_EQ(verified["passed"], true);
  EXPECT_EQ(verified["results"][1]["communicator"], "sockets");
  EXPECT_EQ(verified["results"][1]["ranks"], 2);
  EXPECT_GT(verified["results"][1]["checks"], 0);
}

TEST(SocketsVerify, NamesARankThatIsKilled) {
  const json faults = run_json(
      "verify --faults --communicator sockets --strategy direct --case "
      "direct/killed/mid_dispatch,direct/throws/mid_combine --json");
  ASSERT_EQ(faults.size(), 2);
  for (const json& fault : faults) {
    EXPECT_EQ(fault["communicator"], "sockets");
    EXPECT_EQ(fault["passed"], true) << fault.dump(1);
  }
}

TEST(SocketsBench, StartsItsRanksItself) {
  const CommandResult result = run_command(
      "bench --scenario decode --strategy direct --communicator sockets --ranks 2 --repeat 1 "
      "--warm-up 0");
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("sockets"));
}

TEST(SocketsEval, GivesTheValuesOfThreads) {
  const std::string file = std::string(CROSSDOCK_SOURCE_DIR) + "/examples/cases/demo.json";
  const CommandResult sockets = run_command("eval --check --communicator sockets " + file);
  EXPECT_EQ(sockets.status, 0) << sockets.err;
  EXPECT_EQ(sockets.out, run_command("eval " + file).out);
}

TEST(SocketsEval, GivesTheErrorOfThreads) {
  json eval_case = json::parse(read_project_file("examples/cases/demo.json"));
  eval_case["strategy"] = "teleport";
  const CommandResult threads = run_command("eval -", eval_case.dump());
  const CommandResult sockets = run_command("eval --communicator sockets -", eval_case.dump());
  EXPECT_EQ(sockets.status, 1);
  EXPECT_EQ(sockets.out, threads.out);
}

TEST(SocketsJob, ProcessesOfALauncherAreTheRanks) {
  const json threads = run_json(std::string(kSmallRun) + "--ranks 1");
  const CommandResult result = run_job(3, kSmallRun);
  EXPECT_EQ(result.status, 0) << result.err;
  const json sockets = json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(sockets["communicator"], "sockets");
  EXPECT_EQ(sockets["ranks"], 3);
  EXPECT_EQ(sockets["checksum"], threads["checksum"]);
}

TEST(SocketsJob, PrintsOnceWhatOneProcessDoes) {
  const CommandResult result = run_job(3, "bench --list");
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, run_command("bench --list").out);
}

TEST(SocketsJob, InfoDescribesIt) {
  const CommandResult result = run_job(2, "info --json");
  EXPECT_EQ(result.status, 0) << result.err;
  const json info = json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(info["parts"][1]["name"], "sockets");
  EXPECT_EQ(info["parts"][1]["note"], "this process is rank 0 of 2, nodes: 1");
}

// A launcher ends the job as soon as one process fails; the message must be printed before that.
TEST(SocketsJob, SaysOnceWhatIsWrongWithItsArguments) {
  const std::vector<std::pair<const char*, const char*>> known = {
      {"frobnicate", "unknown command or option"},
      {"run --ranks 2", "--ranks must be the number of processes, 3"},
      {"verify --case no_such", "no check matches"},
  };
  for (const auto& [arguments, words] : known) {
    const CommandResult result = run_job(3, arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_THAT(result.out, IsEmpty()) << arguments;
    const size_t first = result.err.find(words);
    ASSERT_NE(first, std::string::npos) << arguments << "\n" << result.err;
    EXPECT_EQ(result.err.find(words, first + 1), std::string::npos) << result.err;
  }
}

TEST(SocketsJob, RefusesDifferentArgumentsOfItsProcesses) {
  const CommandResult result = run_job({"run --tokens 4", "run --tokens 8"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err,
              HasSubstr("must have the same arguments; rank 0 has `crossdock run --tokens 4`"));
}

TEST(SocketsJob, AnEnvironmentThatNamesARankInPartIsNoJob) {
  const std::string run = CROSSDOCK_COMMAND " " + std::string(kSmallRun);
  for (const auto& [variables, words] :
       {std::pair{"env -u WORLD_SIZE RANK=3 ", "RANK is set but WORLD_SIZE is not"},
        {"env RANK=3 WORLD_SIZE= ", "RANK is set but WORLD_SIZE is not"},
        {"env -u RANK WORLD_SIZE=4 ", "WORLD_SIZE is set but RANK is not"}}) {
    const CommandResult alone = run_program(variables + run);
    EXPECT_EQ(alone.status, 0) << variables;
    EXPECT_THAT(alone.err, HasSubstr(words)) << variables;
    EXPECT_THAT(run_program(variables + run + "--communicator threads").err, IsEmpty());
  }
  const CommandResult wanted =
      run_program("env -u WORLD_SIZE RANK=3 " CROSSDOCK_COMMAND " run --communicator sockets");
  EXPECT_EQ(wanted.status, 1);
  EXPECT_THAT(wanted.err, HasSubstr("RANK is set, so WORLD_SIZE must be set too"));
}

TEST(SocketsJob, ARankOutsideTheJobIsAnError) {
  const CommandResult result = run_program(
      "env RANK=5 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 " CROSSDOCK_COMMAND " " +
      std::string(kSmallRun));
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err + result.out, HasSubstr("RANK must be a number from 0 to 1, got '5'"));
}

}  // namespace
}  // namespace crossdock::cli
