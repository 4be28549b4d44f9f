// Processes that the command starts get their settings and end with the command.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.hpp"
#include "cli/job_processes.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;

struct LongJob {
  const char* arguments;
  int num_processes;  // in total: command, launcher and ranks
  int signal;
};

// GoogleTest's name for it.
void PrintTo(const LongJob& job, std::ostream* out) {  // NOLINT(readability-identifier-naming)
  *out << job.arguments << ", signal " << job.signal;
}

class EndOfJob : public testing::TestWithParam<LongJob> {
 protected:
  ~EndOfJob() override {
    for (const pid_t left : processes_with({word})) kill(left, SIGKILL);
  }

  int num_processes() const { return static_cast<int>(processes_with({word}).size()); }

  // Starts the command with the word in its environment.
  pid_t start(const std::string& arguments) const {
    const std::string line = "exec " CROSSDOCK_COMMAND " " + arguments + " > /dev/null 2>&1";
    const pid_t pid = fork();
    if (pid == 0) {
      const size_t equals = word.find('=');
      setenv(word.substr(0, equals).c_str(), word.substr(equals + 1).c_str(), 1);
      execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      _exit(127);
    }
    return pid;
  }

  const std::string word =
      "CROSSDOCK_TEST_JOB=" + std::to_string(getpid()) + "." +
      std::to_string(std::chrono::steady_clock::now().time_since_epoch().count());
};

TEST_P(EndOfJob, LeavesNoProcessBehind) {
  const LongJob& job = GetParam();
  const bool needs_mpi = std::string(job.arguments).find("mpi") != std::string::npos;
  if (needs_mpi && !mpi_is_built()) GTEST_SKIP() << "built without MPI";
  const pid_t command = start(job.arguments);
  EXPECT_TRUE(comes_true([&] { return num_processes() >= job.num_processes; })) << num_processes();
  kill(command, job.signal);
  int status = 0;
  EXPECT_TRUE(comes_true([&] { return waitpid(command, &status, WNOHANG) == command; }));
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == job.signal) << status;
  EXPECT_TRUE(comes_true([&] { return num_processes() == 0; })) << num_processes() << " are left";
}

constexpr const char* kBench =
    "bench --scenario decode --strategy alltoall --communicator mpi --ranks 2 --repeat 100000000";
constexpr const char* kSocketsBench =
    "bench --scenario decode --strategy alltoall --communicator sockets --ranks 2 --repeat "
    "100000000";
constexpr const char* kRun = "run --tokens 8 --communicator mpi --ranks 2 --steps 100000000";
constexpr const char* kFaults =
    "verify --faults --communicator mpi --strategy direct --case stalls";

INSTANTIATE_TEST_SUITE_P(Commands, EndOfJob,
                         testing::Values(LongJob{kBench, 4, SIGKILL}, LongJob{kBench, 4, SIGTERM},
                                         LongJob{kFaults, 6, SIGKILL}, LongJob{kFaults, 6, SIGINT},
                                         LongJob{kSocketsBench, 4, SIGKILL},
                                         LongJob{kSocketsBench, 4, SIGTERM},
                                         LongJob{kRun, 4, SIGKILL}, LongJob{kRun, 4, SIGTERM}));

TEST(Launcher, ADirectoryNamedMpirunIsNotTheProgram) {
  if (!mpi_is_built()) GTEST_SKIP() << "built without MPI";
  const std::string folder = testing::TempDir() + "launcher_" + std::to_string(getpid());
  std::filesystem::create_directories(folder + "/mpirun");
  const std::string arguments =
      "verify --communicator mpi --strategy direct --ranks 2 --case vector --json";
  const CommandResult found =
      run_program("env PATH=" + folder + ":$PATH " CROSSDOCK_COMMAND " " + arguments);
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  const CommandResult missing =
      run_program("env PATH=" + folder + " " CROSSDOCK_COMMAND " " + arguments);
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.out, HasSubstr("communicator mpi needs mpirun"));
  std::filesystem::remove_all(folder);
}

TEST(Launcher, ALimitOnFileSizesIsAClearError) {
  if (!mpi_is_built()) GTEST_SKIP() << "built without MPI";
  const std::string run =
      "timeout -k 5 100 " CROSSDOCK_COMMAND
      " run --communicator mpi --ranks 2 --strategy direct --width 512 --tokens 20000 --steps 1 "
      "--no-check";
  const CommandResult of_mpirun = run_program("sh -c 'ulimit -f 1000; exec " + run + "'");
  EXPECT_EQ(of_mpirun.status, 1);
  EXPECT_THAT(of_mpirun.err,
              HasSubstr("mpirun: the limit on file sizes must exceed 4194304 bytes"));
  const CommandResult of_ranks = run_program("sh -c 'ulimit -f 20000; exec " + run + "'");
  EXPECT_EQ(of_ranks.status, 1);
  EXPECT_THAT(of_ranks.err, HasSubstr("raise the limit on file sizes (ulimit -f)"));
}

// At exit, survivors of a killed rank wait for it until a deadline that the command sets; with the
// deadline in this test's environment they would not finish in time.
TEST(Launcher, FaultsHaveTheirOwnDeadline) {
  if (!mpi_is_built()) GTEST_SKIP() << "built without MPI";
  const CommandResult result = run_program(
      "env CROSSDOCK_PROGRESS_DEADLINE=100000 timeout 100 " CROSSDOCK_COMMAND
      " verify --faults --communicator mpi --strategy direct --case killed/mid_dispatch_backward "
      "--json");
  EXPECT_EQ(result.status, 0) << result.out << result.err;
}

}  // namespace
}  // namespace crossdock::cli
