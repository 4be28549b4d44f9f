#include "cli/job_processes.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace crossdock::cli {

std::vector<pid_t> processes_with(const std::vector<std::string>& words) {
  std::vector<pid_t> found;
  std::error_code ended;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ended)) {
    std::ifstream file(entry.path() / "environ");
    std::string environment(1, '\0');
    environment.append(std::istreambuf_iterator<char>(file), {});
    const auto has = [&](const std::string& word) {
      return environment.find('\0' + word + '\0') != std::string::npos;
    };
    if (environment.size() > 1 && std::ranges::all_of(words, has)) {
      found.push_back(std::stoi(entry.path().filename().string()));
    }
  }
  return found;
}

bool has_file(pid_t process, const std::string& name) {
  std::error_code ended;
  const std::filesystem::path folder = "/proc/" + std::to_string(process) + "/fd";
  for (const auto& entry : std::filesystem::directory_iterator(folder, ended)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), ended).string();
    if (target.find(name) != std::string::npos) return true;
  }
  return false;
}

RunningCommand::RunningCommand(const std::string& environment, const std::string& arguments) {
  static int number = 0;
  files_ = testing::TempDir() + "crossdock_running_" + std::to_string(getpid()) + "_" +
           std::to_string(++number);
  const std::string line = "exec env " + environment + " " CROSSDOCK_COMMAND " " + arguments +
                           " > " + files_ + ".out 2> " + files_ + ".err < /dev/null";
  process_ = fork();
  if (process_ == 0) {
    execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
    _exit(127);
  }
}

RunningCommand::~RunningCommand() {
  if (process_ > 0) {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  for (const char* suffix : {".out", ".err"}) unlink((files_ + suffix).c_str());
}

CommandResult RunningCommand::wait() {
  int status = 0;
  const bool has_ended =
      comes_true([&] { return waitpid(process_, &status, WNOHANG) == process_; });
  EXPECT_TRUE(has_ended);
  if (has_ended) process_ = -1;
  return {has_ended && WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(files_ + ".out"),
          read_file(files_ + ".err")};
}

}  // namespace crossdock::cli
