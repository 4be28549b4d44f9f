// The command says once for whom it waits, on standard error only.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/job_processes.hpp"
#include "cli/processes/free_port.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

/// Ranks of a job that another launcher has started, one by one.
class LaunchedRanks {
 public:
  explicit LaunchedRanks(int size) : size_(size), port_(find_free_port()) {}
  ~LaunchedRanks() {
    for (const auto& [rank, process] : processes_) kill(process, SIGKILL);
    for (const auto& [rank, process] : processes_) waitpid(process, nullptr, 0);
    for (int rank = 0; rank < size_; ++rank) {
      std::filesystem::remove(file_of(rank, "out"));
      std::filesystem::remove(file_of(rank, "err"));
    }
  }
  LaunchedRanks(const LaunchedRanks&) = delete;
  LaunchedRanks& operator=(const LaunchedRanks&) = delete;

  void start(int rank, const std::string& arguments) {
    const std::string line =
        "exec env RANK=" + std::to_string(rank) + " WORLD_SIZE=" + std::to_string(size_) +
        " MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(port_) +
        " CROSSDOCK_JOB=" + std::to_string(getpid()) + " " CROSSDOCK_COMMAND + " " + arguments +
        " > " + file_of(rank, "out") + " 2> " + file_of(rank, "err");
    const pid_t process = fork();
    if (process == 0) {
      execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      _exit(127);
    }
    processes_[rank] = process;
  }
  void send(int rank, int signal) const { kill(processes_.at(rank), signal); }
  int wait_for(int rank) {
    int status = -1;
    waitpid(processes_.at(rank), &status, 0);
    processes_.erase(rank);
    return status;
  }
  pid_t process(int rank) const { return processes_.at(rank); }
  std::string out(int rank) const { return text_of(rank, "out"); }
  std::string err(int rank) const { return text_of(rank, "err"); }

  /// Whether the rank says this on standard error within two minutes.
  bool says(int rank, const std::string& words) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (err(rank).find(words) == std::string::npos) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }

 private:
  std::string file_of(int rank, const std::string& suffix) const {
    return testing::TempDir() + "crossdock_wait_" + std::to_string(port_) + "." +
           std::to_string(rank) + "." + suffix;
  }
  std::string text_of(int rank, const std::string& suffix) const {
    std::ifstream file(file_of(rank, suffix), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  const int size_;
  const int port_;
  std::map<int, pid_t> processes_;
};

/// Processor time that a process has used; 0 if it is gone.
double cpu_seconds(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text(std::istreambuf_iterator<char>(file), {});
  text.erase(0, text.rfind(')') + 1);  // the program's name, which may contain spaces
  std::istringstream fields(text);
  const std::vector<std::string> values(std::istream_iterator<std::string>(fields), {});
  if (values.size() < 13) return 0.0;
  return (std::stod(values[11]) + std::stod(values[12])) /
         static_cast<double>(sysconf(_SC_CLK_TCK));
}

TEST(WaitNotice, NamesARankThatStartsLate) {
  constexpr const char* kRun = "run --json --steps 1 --width 8 --inner 8 --tokens 4";
  LaunchedRanks ranks(2);
  ranks.start(0, kRun);
  ASSERT_TRUE(ranks.says(0, "waiting for rank 1 to start"));
  ranks.start(1, kRun);
  EXPECT_EQ(ranks.wait_for(0), 0);
  EXPECT_EQ(ranks.wait_for(1), 0);
  const std::string said = ranks.err(0);
  EXPECT_THAT(said, AllOf(StartsWith("crossdock: rank 0 of 2: waiting for rank 1 to start for "),
                          HasSubstr("; gives up in ")));
  const std::string first_line = said.substr(0, said.find('\n') + 1);
  EXPECT_EQ(said.find(first_line, 1), std::string::npos) << said;
  EXPECT_TRUE(json::accept(ranks.out(0))) << ranks.out(0);
  EXPECT_THAT(ranks.err(1) + ranks.out(1), IsEmpty());
}

TEST(WaitNotice, NamesAStoppedRankOnce) {
  constexpr const char* kBench =
      "bench --scenario decode --strategy alltoall --communicator sockets --repeat 100000000";
  LaunchedRanks ranks(3);
  for (int rank = 0; rank < 3; ++rank) ranks.start(rank, kBench);
  for (int rank = 0; rank < 3; ++rank) {  // more than set-up takes
    ASSERT_TRUE(comes_true([&] { return cpu_seconds(ranks.process(rank)) > 1.0; }));
  }
  ranks.send(2, SIGSTOP);
  EXPECT_TRUE(ranks.says(0, "waiting for rank 2 ")) << ranks.err(0);
  EXPECT_THAT(ranks.err(0), AllOf(HasSubstr("crossdock: rank 0 of 3: waiting for rank 2 "),
                                  HasSubstr("; gives up in ")));
  EXPECT_THAT(ranks.err(1), IsEmpty());  // rank 0 speaks for it
}

}  // namespace
}  // namespace crossdock::cli
