#include "support/rank_processes.hpp"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "cli/processes/free_port.hpp"

namespace crossdock::testing {
namespace {

void set_variable(const char* name, const std::string& value) {
  setenv(name, value.c_str(), /*overwrite=*/1);
}

// Does not return in the new process.
pid_t start_rank(int rank, std::vector<std::string> arguments) {
  set_variable("RANK", std::to_string(rank));
  arguments.emplace_back(kAsRank);
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t process = fork();
  if (process != 0) return process;
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // stays in force after exec
  if (getppid() != parent) _exit(EXIT_FAILURE);
  execv("/proc/self/exe", pointers.data());
  _exit(EXIT_FAILURE);
}

}  // namespace

RankProcesses::RankProcesses(int size, const std::vector<std::string>& arguments) {
  const std::string port = std::to_string(cli::find_free_port());
  set_variable("WORLD_SIZE", std::to_string(size));
  set_variable("MASTER_ADDR", "127.0.0.1");
  set_variable("MASTER_PORT", port);
  set_variable("CROSSDOCK_JOB", std::to_string(getpid()) + "." + port);
  for (int rank = 0; rank < size; ++rank) processes_.push_back(start_rank(rank, arguments));
}

std::optional<int> RankProcesses::wait_for(int rank,
                                           std::chrono::steady_clock::time_point deadline) const {
  const pid_t process = processes_[static_cast<size_t>(rank)];
  if (process < 0) return std::nullopt;  // could not be started
  int status = 0;
  while (waitpid(process, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      std::fprintf(stderr, "rank %d has not ended in time and is killed\n", rank);
      kill(process, SIGKILL);
      waitpid(process, &status, 0);
      return std::nullopt;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return status;
}

}  // namespace crossdock::testing
