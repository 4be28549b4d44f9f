// Ctrl-C in a terminal ends the command by that signal, whatever it runs and wherever, and leaves
// nothing behind.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include "cli/job_processes.hpp"
#include "cli/terminal.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::cli {
namespace {

constexpr const char* kControlC = "\x03";

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_directory()) files.push_back(entry.path().string());
  }
  return files;
}

std::string long_job(const std::string& command, const std::string& communicator) {
  const std::string ranks = " --ranks 2 --communicator " + communicator;
  if (command == "verify") return "verify --random 1000000000 --seed 1" + ranks;
  if (command == "run") return "run --tokens 8 --steps 100000000" + ranks;
  return "bench --scenario decode --strategy alltoall --repeat 100000000" + ranks;
}

using Job = std::tuple<const char*, const char*>;  // command, communicator

class Interrupt : public testing::TestWithParam<Job> {
 protected:
  void SetUp() override {
    if (communicator() == "mpi" && !mpi_is_built()) GTEST_SKIP() << "built without MPI";
    std::filesystem::create_directories(folder_);
  }
  ~Interrupt() override {
    for (const pid_t left : processes_with({word_})) kill(left, SIGKILL);
    std::filesystem::remove_all(folder_);
  }

  static std::string communicator() { return std::get<1>(GetParam()); }

  // All files of Open MPI go to the folder. NO_COLOR: the screen shows no progress.
  std::string line() const {
    return "exec env NO_COLOR=1 " + word_ + " TMPDIR=" + folder_ +
           " OMPI_MCA_btl_vader_backing_directory=" + folder_ + " " CROSSDOCK_COMMAND " " +
           long_job(std::get<0>(GetParam()), communicator());
  }

  // The command, the launcher and the ranks.
  bool has_started() const {
    return processes_with({word_}).size() >= (communicator() == "threads" ? 1 : 4);
  }

  void expect_nothing_left() const {
    EXPECT_TRUE(comes_true([&] { return processes_with({word_}).empty(); }));
    EXPECT_THAT(files_in(folder_), testing::IsEmpty());
  }

  const std::string word_ = "CROSSDOCK_TEST_JOB=interrupt." + std::to_string(getpid());
  const std::string folder_ =
      testing::TempDir() + "crossdock_interrupt_" + std::to_string(getpid());
};

TEST_P(Interrupt, EndsTheCommandByTheSignalAndLeavesNothing) {
  for (int round = 0; round < 3; ++round) {
    const Screen screen = run_in_terminal(
        line(), 80, [&](const std::string&) { return has_started() ? kControlC : ""; });
    EXPECT_EQ(screen.signal, SIGINT) << screen.status << "\n" << screen.text();
    // The random cases that have passed, which only the process that runs them knows.
    const bool has_results =
        std::string(std::get<0>(GetParam())) == "verify" && communicator() == "threads";
    EXPECT_THAT(screen.text(),
                testing::MatchesRegex(has_results ? "\\^C(.*passed.*)?\n" : "\\^C\n"));
    expect_nothing_left();
  }
}

// As timeout and shells do: the signal goes to the command and to its whole process group.
TEST_P(Interrupt, BySignalsToTheProcessGroupDoesTheSame) {
  const Screen screen = run_in_terminal(line(), 80, [&](const std::string&) {
    if (!has_started()) return "";
    const std::vector<pid_t> processes = processes_with({word_});
    const auto is_first = [](pid_t one) { return getpgid(one) == getsid(one); };
    const auto command = std::ranges::find_if(processes, is_first);
    if (command == processes.end()) return "";
    kill(*command, SIGTERM);
    kill(-*command, SIGTERM);
    return " ";
  });
  EXPECT_EQ(screen.signal, SIGTERM) << screen.status << "\n" << screen.text();
  expect_nothing_left();
}

// Open MPI's leaves them sometimes, if the signal comes while it starts the ranks.
TEST(InterruptedLauncher, LeavesNoFilesOfItsOwn) {
  if (!mpi_is_built()) GTEST_SKIP() << "built without MPI";
  const std::string folder = testing::TempDir() + "crossdock_launcher_" + std::to_string(getpid());
  const std::string temporary = folder + "/tmp";
  std::filesystem::create_directories(temporary);
  std::ofstream(folder + "/mpirun") << "#!/bin/sh\n"
                                       "session=$TMPDIR/ompi.$(hostname -s).$(id -u)/pid.$$\n"
                                       "mkdir -p $session && touch $session/contact.txt\n"
                                       "exec sleep 1000\n";
  std::filesystem::permissions(folder + "/mpirun", std::filesystem::perms::owner_all);
  const Screen screen = run_in_terminal(
      "exec env NO_COLOR=1 PATH=" + folder + ":$PATH TMPDIR=" + temporary +
          " " CROSSDOCK_COMMAND " verify --quick --ranks 2 --communicator mpi",
      80, [&](const std::string&) { return files_in(temporary).empty() ? "" : kControlC; });
  EXPECT_EQ(screen.signal, SIGINT) << screen.status << "\n" << screen.text();
  EXPECT_TRUE(std::filesystem::is_empty(temporary));
  std::filesystem::remove_all(folder);
}

// Types Ctrl-C when the program has written the word.
Screen interrupt_after(const std::string& word, const std::string& arguments) {
  return run_in_terminal("exec env -u NO_COLOR TERM=xterm " CROSSDOCK_COMMAND " " + arguments, 80,
                         [&](const std::string& bytes) {
                           return bytes.find(word) == std::string::npos ? "" : kControlC;
                         });
}

// The last size would take minutes.
constexpr const char* kSizes =
    "bench --tokens 8,16,64k --width 512 --top-k 4 --experts 16 --ranks 2 --strategy direct "
    "--communicator threads --repeat 500 --warm-up 0 --no-check ";

TEST(InterruptedBench, HasPrintedTheSizesThatFinished) {
  const Screen screen = interrupt_after("2 of 3", kSizes);
  EXPECT_EQ(screen.signal, SIGINT) << screen.status << "\n" << screen.text();
  EXPECT_THAT(screen.text(), testing::ContainsRegex("tokens +"));
  EXPECT_THAT(screen.text(), testing::ContainsRegex("\n +8 +[0-9.]+"));
  EXPECT_THAT(screen.text(), testing::ContainsRegex("\n +16 +[0-9.]+"));
  EXPECT_THAT(screen.text(), testing::Not(testing::ContainsRegex("\n +65536 +[0-9.]+")));
}

TEST(InterruptedBench, PrintsADocumentOfWhatFinished) {
  const Screen screen = interrupt_after("2 of 3", kSizes + std::string("--json"));
  EXPECT_EQ(screen.signal, SIGINT) << screen.status << "\n" << screen.text();
  EXPECT_THAT(screen.text(), testing::HasSubstr("\"tokens\": 16"));
  EXPECT_THAT(screen.text(), testing::Not(testing::HasSubstr("\"tokens\": 65536")));
}

TEST(InterruptedVerify, PrintsTheRandomCasesThatHavePassed) {
  for (const std::string option : {"", " --json"}) {
    const Screen screen = interrupt_after(
        "s left", "verify --random 1000000000 --seed 1 --ranks 2 --communicator threads" + option);
    EXPECT_EQ(screen.signal, SIGINT) << screen.status << "\n" << screen.text();
    EXPECT_THAT(screen.text(),
                testing::HasSubstr(option.empty() ? "all passed" : "\"passed\": true"));
    EXPECT_THAT(
        screen.text(),
        testing::ContainsRegex("interrupted after [0-9]+ of 1000000000 random cases on threads"));
  }
}

// The checks of a few ranks take moments, those of 400 ranks minutes.
TEST(InterruptedVerify, PrintsWhatHasPassed) {
  const Screen screen = interrupt_after(
      "400 ranks",
      "verify --strategy direct --communicator threads --ranks 2,400 --case vector,skewed");
  EXPECT_EQ(screen.signal, SIGINT) << screen.status << "\n" << screen.text();
  EXPECT_THAT(screen.text(), testing::ContainsRegex("threads, 2 ranks +[0-9]+ ok"));
  EXPECT_THAT(screen.text(), testing::HasSubstr("interrupted after 1 of 2 combinations"));
}

INSTANTIATE_TEST_SUITE_P(Commands, Interrupt,
                         testing::Combine(testing::Values("run", "bench", "verify"),
                                          testing::Values("threads", "sockets", "mpi")));

// A rank of mpirun, which ends the others before they can say anything.
TEST(RankOfMpirun, IsNamedIfItIsKilled) {
  if (!mpi_is_built()) GTEST_SKIP() << "built without MPI";
  const std::string word = "CROSSDOCK_TEST_JOB=mpirun." + std::to_string(getpid());
  RunningCommand command(word, "verify --random 1000000 --communicator mpi --ranks 4 --json");
  std::vector<pid_t> found;
  EXPECT_TRUE(comes_true([&] {
    found = processes_with({word, "OMPI_COMM_WORLD_RANK=2"});
    return !found.empty() && has_file(found[0], "crossdock-window");
  }));
  if (!found.empty()) kill(found[0], SIGKILL);
  const CommandResult result = command.wait();
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, testing::HasSubstr("rank 2 was ended by signal 9 (Killed)"));
}

}  // namespace
}  // namespace crossdock::cli
