#include "cli/processes/rank_launcher.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "cli/processes/free_port.hpp"
#include "cli/processes/rank_failure.hpp"

namespace crossdock::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kLaunch = "launch-ranks";
constexpr const char* kLaunchWithADeath = "launch-ranks-with-a-death";
constexpr int kNumOwnWords = 3;                 // program, kLaunch, number of ranks
constexpr std::chrono::seconds kEndTime{20};    // to end by itself after another rank has failed
constexpr std::chrono::seconds kSignalTime{5};  // to end after SIGTERM
constexpr long kLookNanoseconds = 100'000'000;
constexpr auto kNever = std::chrono::steady_clock::time_point::max();

// Signals that this program waits for, instead of being interrupted by them.
sigset_t awaited_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM}) sigaddset(&signals, signal);
  return signals;
}

class RankProcesses {
  struct Process {
    int rank;
    pid_t pid;
  };

 public:
  RankProcesses(int num_ranks, bool survives_deaths)
      : num_ranks_(num_ranks), survives_deaths_(survives_deaths) {}

  // Returns whether all could be started; if not, none is left running.
  bool start(char** command, const sigset_t& signals_of_ranks) {
    const std::string size = std::to_string(num_ranks_);
    setenv("WORLD_SIZE", size.c_str(), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", std::to_string(find_free_port()).c_str(), 1);
    setenv("CROSSDOCK_JOB", std::to_string(getpid()).c_str(), 1);
    unsetenv("TORCHELASTIC_USE_AGENT_STORE");
    for (int rank = 0; rank < num_ranks_; ++rank) {
      setenv("RANK", std::to_string(rank).c_str(), 1);
      const pid_t pid = fork();
      if (pid == 0) {
        sigprocmask(SIG_SETMASK, &signals_of_ranks, nullptr);
        execv("/proc/self/exe", command);
        _exit(kCannotStart);
      }
      if (pid < 0) {
        std::fprintf(stderr, "crossdock: cannot start rank %d of %d: %s\n", rank, num_ranks_,
                     std::strerror(errno));
        send_all(SIGKILL);
        while (waitpid(-1, nullptr, 0) > 0) {
        }
        return false;
      }
      running_.push_back({.rank = rank, .pid = pid});
    }
    return true;
  }

  // Waits for the end of all ranks. Returns the signal that asked for it, or 0.
  int wait(const sigset_t& signals) {
    int asked_by = 0;
    while (!running_.empty()) {
      const timespec look{.tv_sec = 0, .tv_nsec = kLookNanoseconds};
      const int signal = sigtimedwait(&signals, nullptr, &look);
      if (signal > 0 && signal != SIGCHLD && asked_by == 0) {
        asked_by = signal;
        end_at_ = Clock::now();
      }
      reap();
      hurry();
    }
    return asked_by;
  }

  int status() const { return survives_deaths_ ? 0 : status_; }

 private:
  void reap() {
    int status = 0;
    pid_t ended = 0;
    while ((ended = waitpid(-1, &status, WNOHANG)) > 0) {
      const auto rank = std::ranges::find(running_, ended, &Process::pid);
      if (rank == running_.end()) continue;
      // A rank that fails exits with status 1 or 2 and says why itself; nobody speaks for others.
      const bool is_silent = !WIFEXITED(status) || WEXITSTATUS(status) > 2;
      if (is_silent && !survives_deaths_ && !has_been_asked_) {
        report_to_command({.rank = rank->rank, .has_died = true, .message = describe_end(status)});
      }
      running_.erase(rank);
      if (status == 0 || status_ != 0) continue;
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      if (!survives_deaths_ && end_at_ == kNever) end_at_ = Clock::now() + kEndTime;
    }
  }

  // Ends ranks whose time is up.
  void hurry() {
    if (Clock::now() < end_at_) return;
    send_all(has_been_asked_ ? SIGKILL : SIGTERM);
    has_been_asked_ = true;
    end_at_ = Clock::now() + kSignalTime;
  }

  void send_all(int signal) const {
    for (const Process& one : running_) kill(one.pid, signal);
  }

  const int num_ranks_;
  const bool survives_deaths_;
  std::vector<Process> running_;
  Clock::time_point end_at_ = kNever;
  bool has_been_asked_ = false;
  int status_ = 0;  // of the first rank that failed
};

}  // namespace

std::vector<std::string> rank_launcher_command(const std::string& program, int ranks,
                                               bool survives_deaths,
                                               const std::vector<std::string>& args) {
  std::vector<std::string> command = {program, survives_deaths ? kLaunchWithADeath : kLaunch,
                                      std::to_string(ranks)};
  command.insert(command.end(), args.begin(), args.end());
  return command;
}

bool is_rank_launcher(int argc, char** argv) {
  return argc > kNumOwnWords &&
         (std::strcmp(argv[1], kLaunch) == 0 || std::strcmp(argv[1], kLaunchWithADeath) == 0);
}

int launch_ranks(int argc, char** argv) {
  std::vector<char*> command = {argv[0]};
  command.insert(command.end(), argv + kNumOwnWords, argv + argc);
  command.push_back(nullptr);
  signal(SIGCHLD, SIG_DFL);
  const sigset_t signals = awaited_signals();
  sigset_t before;
  sigprocmask(SIG_BLOCK, &signals, &before);
  RankProcesses ranks(std::atoi(argv[2]), std::strcmp(argv[1], kLaunchWithADeath) == 0);
  if (!ranks.start(command.data(), before)) return EXIT_FAILURE;
  const int asked_by = ranks.wait(signals);
  if (asked_by != 0) {  // end as asked
    signal(asked_by, SIG_DFL);
    sigprocmask(SIG_SETMASK, &before, nullptr);
    raise(asked_by);
  }
  return ranks.status();
}

}  // namespace crossdock::cli
