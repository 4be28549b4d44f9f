#include "cli/processes/launch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string_view>
#include <thread>
#include <utility>

#include "cli/commands.hpp"
#include "cli/machine.hpp"
#include "cli/processes/interruption.hpp"
#include "cli/processes/parent_watch.hpp"
#include "cli/processes/rank_failure.hpp"
#include "cli/processes/rank_launcher.hpp"
#include "cli/text/progress_line.hpp"
#include "cli/text/terminal.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPollMilliseconds = 200;
constexpr int kSignalled =
    128;  // and the signal's number: how a launcher shows that a signal ended a rank
constexpr rlim_t kLargestFileOfMpirun = 4 << 20;  // a segment of PMIx
constexpr size_t kErrorsKept = 65536;             // of what mpirun wrote last

// "NAME=value" entries, each name once.
class Environment {
 public:
  Environment() {
    for (char** variable = environ; *variable != nullptr; ++variable) {
      variables_.emplace_back(*variable);
    }
  }
  void set(const std::string& name, const std::string& value) {
    const std::string head = name + "=";
    std::erase_if(variables_, [&](const std::string& one) { return one.starts_with(head); });
    variables_.push_back(head + value);
  }
  // Keeps a value that the user has set.
  void set_default(const std::string& name, const std::string& value) {
    if (std::getenv(name.c_str()) == nullptr) set(name, value);
  }
  std::vector<std::string>& variables() { return variables_; }

 private:
  std::vector<std::string> variables_;
};

// The OMPI variables are settings of Open MPI, which other MPIs ignore: ranks may outnumber cores,
// are not bound to any, and do not use the network.
Environment environment_of_ranks() {
  Environment environment;
  environment.set(kEndsWithParent, "1");
  const TextStyle style = output_style();
  environment.set("COLUMNS", std::to_string(style.width));
  if (style.colour) environment.set("CLICOLOR_FORCE", "1");
  environment.set_default("OMPI_MCA_rmaps_base_oversubscribe", "1");
  environment.set_default("OMPI_MCA_hwloc_base_binding_policy", "none");
  environment.set_default("OMPI_MCA_btl_tcp_if_include", "lo");
  if (geteuid() == 0) {
    environment.set_default("OMPI_ALLOW_RUN_AS_ROOT", "1");
    environment.set_default("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  return environment;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

[[noreturn]] void throw_failure(const std::string& message) {
  throw Error(ErrorCode::kCommunication, message);
}

volatile sig_atomic_t caught_signal = 0;
volatile sig_atomic_t group_of_child = 0;  // 0: there is none

// Ctrl-Z in the terminal does not reach the child, which has a process group of its own.
void pause_with_child(int /*signal*/) {
  const int error = errno;
  if (group_of_child != 0) kill(-group_of_child, SIGSTOP);
  raise(SIGSTOP);
  if (group_of_child != 0) kill(-group_of_child, SIGCONT);
  errno = error;
}

// While this object exists, signals to terminate this process are only recorded, so that it can end
// its child first.
class SignalCatcher {
 public:
  SignalCatcher() {
    for (size_t i = 0; i < kSignals.size(); ++i) {
      struct sigaction keep {};
      keep.sa_handler = [](int signal) { caught_signal = signal; };
      if (kSignals[i] == SIGTSTP) keep.sa_handler = pause_with_child;
      sigaction(kSignals[i], nullptr, &old_[i]);
      if (old_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &keep, nullptr);
    }
  }
  ~SignalCatcher() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &old_[i], nullptr);
  }
  SignalCatcher(const SignalCatcher&) = delete;
  SignalCatcher& operator=(const SignalCatcher&) = delete;

 private:
  static constexpr std::array kSignals = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
  std::array<struct sigaction, kSignals.size()> old_{};
};

// Prepared before fork, for the child.
struct Start {
  std::vector<char*> command;
  std::vector<char*> environment;
  int output;  // becomes its standard output
  int errors;  // becomes its standard error; -1: that of this program
  pid_t parent;
};

// The child, between fork and exec: calls only async-signal-safe functions.
[[noreturn]] void become_program(const Start& start) {
  // The launcher ends when this process does, for whatever reason, and then ends its ranks.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != start.parent) _exit(EXIT_FAILURE);
  // The signals of the terminal are for this program, which ends the launcher with one signal:
  // mpirun would leave its files behind if it got a second one while it ends.
  setpgid(0, 0);
  signal(SIGTTOU, SIG_IGN);  // may print to the terminal
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);  // must not read from the terminal
  dup2(start.output, STDOUT_FILENO);
  if (start.errors >= 0) dup2(start.errors, STDERR_FILENO);
  signal(SIGXFSZ, SIG_DFL);  // ignored by this program; others must not
  execve(start.command[0], start.command.data(), start.environment.data());
  _exit(kCannotStart);
}

// The folder of a job of Open MPI, which its mpirun sometimes leaves behind if a signal ends it
// while it starts the ranks.
void remove_session_of(pid_t mpirun) {
  namespace fs = std::filesystem;
  std::string folder = "/tmp";
  for (const char* name : {"TMP", "TEMP", "TMPDIR"}) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') folder = value;
  }
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::string name = host.data();
  name.resize(std::min(name.size(), name.find('.')));
  const fs::path sessions = fs::path(folder) / ("ompi." + name + "." + std::to_string(geteuid()));
  std::error_code ignored;
  fs::remove_all(sessions / ("pid." + std::to_string(mpirun)), ignored);
  fs::remove(sessions, ignored);  // if it was the last one
}

// One end of a pipe, or a file; closed with its owner.
class File {
 public:
  File() = default;
  explicit File(int number) : number_(number) {}
  ~File() {
    if (number_ >= 0) close(number_);
  }
  File(File&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_ = -1;
};

struct Pipe {
  File read, write;
};

Pipe new_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) throw_failure("cannot create a pipe");
  return {File(ends[0]), File(ends[1])};
}

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

// What becomes of the standard error of a child. Watched: it passes through, and its end is kept.
enum class Errors { kInherited, kDiscarded, kWatched };

// A running program and the read end of its standard output. The destructor ends the program.
class Child {
 public:
  Child(std::vector<std::string> command, std::vector<std::string> environment, Errors kind) {
    Pipe output = new_pipe();
    Pipe errors = kind == Errors::kWatched ? new_pipe() : Pipe{};
    if (kind == Errors::kDiscarded) errors.write = File(open("/dev/null", O_WRONLY | O_CLOEXEC));
    const Start start{.command = pointers_to(command),
                      .environment = pointers_to(environment),
                      .output = output.write.number(),
                      .errors = errors.write.number(),
                      .parent = getpid()};
    pid_ = fork();
    if (pid_ == 0) become_program(start);
    if (pid_ > 0) {
      setpgid(pid_, pid_);  // whichever of the two processes is first
      group_of_child = pid_;
    }
    output_ = std::move(output.read);
    errors_ = std::move(errors.read);
    if (pid_ < 0) throw_failure("cannot start " + command[0]);
  }
  ~Child() {
    output_ = File();
    errors_ = File();
    group_of_child = 0;
    if (pid_ < 0) return;
    end();
    remove_session_of(pid_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  enum class Reading { kEnd, kDeadline, kSignal };

  // Reads until the program closes its output, the deadline passes or a signal arrives. `on_piece`
  // is called when the text has grown.
  Reading read_to_end(std::string& text, Clock::time_point deadline,
                      const std::function<void()>& on_piece) {
    while (output_.is_open() || errors_.is_open()) {
      if (caught_signal != 0) return Reading::kSignal;
      if (Clock::now() >= deadline) return Reading::kDeadline;
      // poll ignores files that are closed, whose number is -1.
      std::array waiting = {pollfd{.fd = output_.number(), .events = POLLIN, .revents = 0},
                            pollfd{.fd = errors_.number(), .events = POLLIN, .revents = 0}};
      if (poll(waiting.data(), waiting.size(), kPollMilliseconds) <= 0) continue;
      if (waiting[1].revents != 0) {
        const std::string piece = read_piece(errors_);
        write_all(STDERR_FILENO, piece);
        last_errors_ += piece;
        if (last_errors_.size() > kErrorsKept) last_errors_.erase(0, last_errors_.size() / 2);
      }
      if (waiting[0].revents != 0) {
        text += read_piece(output_);
        if (output_.is_open()) on_piece();
      }
    }
    return Reading::kEnd;
  }

  // The end of its standard error, if that is watched.
  const std::string& last_errors() const { return last_errors_; }

  // The exit status. The program must have closed its output.
  int wait_for_end() {
    int status = 0;
    pid_t ended = -1;
    do {
      ended = waitpid(pid_, &status, 0);
    } while (ended < 0 && errno == EINTR && caught_signal == 0);
    if (ended > 0) pid_ = -1;
    return ended > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  void end() const {
    kill(pid_, SIGTERM);  // the launcher then ends its ranks
    for (int i = 0; i < 100; ++i) {
      if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  // Closes the file at its end.
  static std::string read_piece(File& file) {
    std::string piece(65536, '\0');  // what a pipe holds
    ssize_t count = 0;
    do {
      count = read(file.number(), piece.data(), piece.size());
    } while (count < 0 && errno == EINTR && caught_signal == 0);
    if (count == 0 || (count < 0 && errno != EINTR)) file = File();
    piece.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
    return piece;
  }

  pid_t pid_ = -1;
  File output_, errors_;
  std::string last_errors_;
};

std::string path_of_this_program() {
  std::array<char, 4096> path{};
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  return length > 0 ? std::string(path.data(), static_cast<size_t>(length)) : "crossdock";
}

struct JobEnd {
  std::string launcher;
  int status;
  std::string output;
  int first_dead = -1;  // the rank whose death the launcher has noticed first; -1: unknown
  std::vector<RankFailure> failures{};
};

// The rank of "mpirun noticed that process rank 2 with PID ...", or -1.
int rank_named_by_mpirun(std::string_view errors) {
  constexpr std::string_view kNotice = "noticed that process rank ";
  const size_t at = errors.find(kNotice);
  int rank = -1;
  if (at == std::string_view::npos) return rank;
  errors.remove_prefix(at + kNotice.size());
  std::from_chars(errors.data(), errors.data() + errors.size(), rank);
  return rank;
}

// mpirun of Open MPI hangs if it cannot write its own files.
void check_file_size_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur > kLargestFileOfMpirun) return;
  throw_failure("mpirun: the limit on file sizes must exceed " +
                std::to_string(kLargestFileOfMpirun) + " bytes, got " +
                std::to_string(limit.rlim_cur) +
                "; raise it (ulimit -f) or use --communicator threads");
}

std::string find_mpirun() {
  std::string launcher = find_program("mpirun");
  if (launcher.empty()) {
    throw Error(ErrorCode::kUnsupported,
                "communicator mpi needs mpirun, and there is none on the PATH (Debian: "
                "openmpi-bin); or use --communicator sockets or threads");
  }
  check_file_size_limit();
  return launcher;
}

// How the ranks of a job are started.
struct Launcher {
  std::string name;  // for messages
  std::vector<std::string> command;
  Environment environment;
};

Launcher launcher_of(const ProcessJob& job, bool has_a_death) {
  Environment environment = environment_of_ranks();
  const std::string program = path_of_this_program();
  if (job.communicator != "mpi") {
    return {.name = "the launcher of ranks",
            .command = rank_launcher_command(program, job.ranks, has_a_death, job.args),
            .environment = std::move(environment)};
  }
  std::vector<std::string> command = {find_mpirun(), "-np", std::to_string(job.ranks)};
  if (has_a_death) {
    command.emplace_back("--enable-recovery");
    environment.set("CROSSDOCK_PROGRESS_DEADLINE", "1");  // for the final wait for the dead process
  }
  command.push_back(program);
  command.insert(command.end(), job.args.begin(), job.args.end());
  return {.name = "mpirun", .command = std::move(command), .environment = std::move(environment)};
}

// A signal that arrives in the meantime is left in caught_signal.
JobEnd run_or_be_interrupted(const ProcessJob& job, bool has_a_death) {
  Launcher launcher = launcher_of(job, has_a_death);
  const SignalCatcher catcher;
  Child child(std::move(launcher.command), std::move(launcher.environment.variables()),
              has_a_death                 ? Errors::kDiscarded
              : job.communicator == "mpi" ? Errors::kWatched
                                          : Errors::kInherited);
  std::string output;
  size_t searched = 0;
  const ProgressLine line;
  const auto show = [&] {
    const std::optional<RankProgress> progress = take_progress(output, searched);
    if (!progress) return;
    if (job.on_progress) {
      job.on_progress(*progress);
    } else {
      line.show(progress->words, progress->done);
    }
  };
  const Child::Reading reading = child.read_to_end(output, Clock::now() + job.limit, show);
  if (reading == Child::Reading::kSignal)
    return {.launcher = launcher.name, .status = -1, .output = ""};
  if (reading == Child::Reading::kDeadline) {
    throw Error(ErrorCode::kTimeout, launcher.name + ": " + std::to_string(job.ranks) +
                                         " ranks did not end within " +
                                         std::to_string(job.limit.count()) + " s");
  }
  const int status = child.wait_for_end();
  if (status == kCannotStart && output.empty()) throw_failure("cannot start " + launcher.name);
  return {.launcher = launcher.name,
          .status = status,
          .output = std::move(output),
          .first_dead = rank_named_by_mpirun(child.last_errors())};
}

JobEnd run(const ProcessJob& job, bool has_a_death) {
  JobEnd end = run_or_be_interrupted(job, has_a_death);
  if (caught_signal != 0) end_by_signal(caught_signal);  // the job has ended; end as asked
  end.failures = take_reports(end.output);
  return end;
}

[[noreturn]] void throw_failure_of(const JobEnd& end) {
  if (!end.failures.empty()) throw_failure(describe(end.failures));
  if (end.status < 0) throw_failure(end.launcher + " was ended by a signal");
  throw_failure(end.launcher + ": " +
                (end.status > kSignalled
                     ? (end.first_dead < 0 ? "a rank" : "rank " + std::to_string(end.first_dead)) +
                           " " + describe_end(end.status - kSignalled)
                     : "the ranks ended with status " + std::to_string(end.status)));
}

}  // namespace

std::string run_processes(const ProcessJob& job) {
  JobEnd end = run(job, /*has_a_death=*/false);
  if (end.status != 0) throw_failure_of(end);
  return std::move(end.output);
}

std::string run_processes_with_a_death(const ProcessJob& job) {
  return run(job, /*has_a_death=*/true).output;
}

int show_processes(const ProcessJob& job) {
  const JobEnd end = run(job, /*has_a_death=*/false);
  // The ranks have printed why, in their results or as a complaint about arguments.
  const bool is_said =
      end.status == kBadArguments || (end.status == kFailure && !end.output.empty());
  if (!end.failures.empty() || (end.status != 0 && !is_said)) throw_failure_of(end);
  std::cout << end.output << std::flush;
  return end.status;
}

}  // namespace crossdock::cli
