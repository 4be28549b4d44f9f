#include "mpi_launch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "crossdock/error.hpp"
#include "machine.hpp"

namespace crossdock::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Settings of Open MPI; another MPI does not look at them. Ranks may outnumber cores and are bound
// to none; nothing leaves this machine.
std::vector<std::string> environment_of_ranks() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    variables.emplace_back(*variable);
  }
  variables.emplace_back("OMPI_MCA_rmaps_base_oversubscribe=1");
  variables.emplace_back("OMPI_MCA_hwloc_base_binding_policy=none");
  variables.emplace_back("OMPI_MCA_btl_tcp_if_include=lo");
  if (geteuid() == 0) {
    variables.emplace_back("OMPI_ALLOW_RUN_AS_ROOT=1");
    variables.emplace_back("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1");
  }
  return variables;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

[[noreturn]] void throw_failure(const std::string& message) {
  throw Error(ErrorCode::kCommunication, "mpirun: " + message);
}

// A running program and the read end of its standard output. Ends it, if it has not ended.
class Child {
 public:
  Child(std::vector<std::string> command, std::vector<std::string> environment, bool is_quiet) {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) throw_failure("no pipe could be made");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    if (is_quiet) {
      posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    }
    posix_spawn_file_actions_addclose(&actions, ends[0]);
    posix_spawn_file_actions_addclose(&actions, ends[1]);
    const int status = posix_spawn(&pid_, command[0].c_str(), &actions, nullptr,
                                   pointers_to(command).data(), pointers_to(environment).data());
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    output_ = ends[0];
    if (status != 0) {
      close(output_);
      throw_failure("cannot start " + command[0]);
    }
  }
  ~Child() {
    close(output_);
    if (pid_ < 0) return;
    kill(pid_, SIGTERM);  // mpirun then ends its ranks
    for (int i = 0; i < 50 && waitpid(pid_, nullptr, WNOHANG) == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, WNOHANG);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // All of its output; false if it is still writing at the deadline.
  bool read_to_end(std::string& text, Clock::time_point deadline) const {
    std::array<char, 4096> piece{};
    for (;;) {
      const auto left = deadline - Clock::now();
      if (left <= Clock::duration::zero()) return false;
      pollfd waiting{.fd = output_, .events = POLLIN, .revents = 0};
      if (poll(&waiting, 1, static_cast<int>(left / std::chrono::milliseconds(1)) + 1) <= 0) {
        continue;
      }
      const ssize_t count = read(output_, piece.data(), piece.size());
      if (count <= 0) return true;
      text.append(piece.data(), static_cast<size_t>(count));
    }
  }

  // Its exit status; it must have closed its output.
  int wait_for_end() {
    int status = 0;
    const pid_t ended = waitpid(pid_, &status, 0);
    pid_ = -1;
    return ended > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

std::string path_of_this_program() {
  std::array<char, 4096> path{};
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  return length > 0 ? std::string(path.data(), static_cast<size_t>(length)) : "crossdock";
}

struct Job {
  int ranks;
  const std::vector<std::string>& args;
  std::chrono::seconds limit;
  bool has_a_death;
};

struct JobEnd {
  int status;
  std::string output;
};

std::string find_launcher() {
  std::string launcher = find_program("mpirun");
  if (launcher.empty()) {
    throw Error(ErrorCode::kUnsupported,
                "communicator mpi needs mpirun, and there is none on the PATH (Debian: "
                "openmpi-bin); or choose --communicator threads");
  }
  return launcher;
}

JobEnd run(const Job& job) {
  std::vector<std::string> command = {find_launcher(), "-np", std::to_string(job.ranks)};
  std::vector<std::string> environment = environment_of_ranks();
  if (job.has_a_death) {
    command.emplace_back("--enable-recovery");
    environment.emplace_back("CROSSDOCK_PROGRESS_DEADLINE=1");  // of the wait for it at the end
  }
  command.push_back(path_of_this_program());
  command.insert(command.end(), job.args.begin(), job.args.end());
  Child child(std::move(command), std::move(environment), /*is_quiet=*/job.has_a_death);
  std::string output;
  if (!child.read_to_end(output, Clock::now() + job.limit)) {
    throw Error(ErrorCode::kTimeout, "mpirun: " + std::to_string(job.ranks) +
                                         " ranks did not end within " +
                                         std::to_string(job.limit.count()) + " s");
  }
  const int status = child.wait_for_end();
  return {.status = status, .output = std::move(output)};
}

}  // namespace

std::string run_under_mpi(int ranks, const std::vector<std::string>& args,
                          std::chrono::seconds limit) {
  JobEnd end = run({.ranks = ranks, .args = args, .limit = limit, .has_a_death = false});
  if (end.status != 0) throw_failure("the ranks ended with status " + std::to_string(end.status));
  return std::move(end.output);
}

std::string run_under_mpi_with_a_death(int ranks, const std::vector<std::string>& args,
                                       std::chrono::seconds limit) {
  return run({.ranks = ranks, .args = args, .limit = limit, .has_a_death = true}).output;
}

void continue_under_mpi(int ranks, const std::vector<std::string>& args) {
  std::vector<std::string> command = {find_launcher(), "-np", std::to_string(ranks),
                                      path_of_this_program()};
  command.insert(command.end(), args.begin(), args.end());
  std::vector<std::string> environment = environment_of_ranks();
  execve(command[0].c_str(), pointers_to(command).data(), pointers_to(environment).data());
  throw_failure("cannot start " + command[0]);
}

}  // namespace crossdock::cli
