// main() of GoogleTest programs whose ranks are processes of communicator sockets. The program has
// one argument, the number of processes, and starts itself that many times, by exec, so that no
// process inherits anything of CUDA. Every process runs every test; rank 0 prints as usual, the
// others only what fails there. The program fails if any process fails or has not ended at the
// deadline.
//
// As under MPI, a test must use EXPECT, not ASSERT, before collective calls.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "cli/processes/free_port.hpp"
#include "crossdock/group.hpp"
#include "support/failure_printer.hpp"
#include "support/process_communicator.hpp"

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kJobDeadline{600};
constexpr const char* kAsRank = "--as-rank";  // follows the other arguments of a rank

void set_variable(const char* name, const std::string& value) {
  setenv(name, value.c_str(), /*overwrite=*/1);
}

// Does not return in the new process.
pid_t start_rank(int rank, std::vector<std::string> arguments) {
  const pid_t parent = getpid();
  const pid_t process = fork();
  if (process != 0) return process;
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // stays in force after exec
  if (getppid() != parent) _exit(EXIT_FAILURE);
  set_variable("RANK", std::to_string(rank));
  arguments.emplace_back(kAsRank);
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execv("/proc/self/exe", pointers.data());
  _exit(EXIT_FAILURE);
}

// Whether it succeeded. Kills it at the deadline.
bool wait_for(pid_t process, int rank, Clock::time_point deadline) {
  int status = 0;
  while (waitpid(process, &status, WNOHANG) == 0) {
    if (Clock::now() > deadline) {
      std::fprintf(stderr, "rank %d has not ended in time and is killed\n", rank);
      kill(process, SIGKILL);
      waitpid(process, &status, 0);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (WIFSIGNALED(status)) {
    std::fprintf(stderr, "rank %d died of signal %d\n", rank, WTERMSIG(status));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int run_job(int size, const std::vector<std::string>& arguments) {
  set_variable("WORLD_SIZE", std::to_string(size));
  set_variable("MASTER_ADDR", "127.0.0.1");
  set_variable("MASTER_PORT", std::to_string(crossdock::cli::find_free_port()));
  set_variable("CROSSDOCK_JOB", std::to_string(getpid()));
  const Clock::time_point deadline = Clock::now() + kJobDeadline;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) processes.push_back(start_rank(rank, arguments));
  bool is_good = true;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t process = processes[static_cast<size_t>(rank)];
    is_good = process > 0 && wait_for(process, rank, deadline) && is_good;
  }
  if (!is_good) std::fprintf(stderr, "some rank has failed\n");
  return is_good ? EXIT_SUCCESS : EXIT_FAILURE;
}

// No process ends while another may still use its memory.
int run_rank() {
  crossdock::Group all(crossdock::testing::make_process_communicator(),
                       {.arrival_deadline = kJobDeadline, .progress_deadline = kJobDeadline});
  crossdock::testing::print_as_rank(all.rank());
  const int failed = RUN_ALL_TESTS();
  all.agree({.operation = "end"});
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  ::testing::InitGoogleTest(&argc, argv);
  try {
    if (arguments.back() == kAsRank) return run_rank();
    const int size = argc == 2 ? std::atoi(argv[1]) : 0;
    if (size > 0) return run_job(size, arguments);
    std::fprintf(stderr, "usage: %s NUMBER_OF_PROCESSES\n", argv[0]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return EXIT_FAILURE;
}
