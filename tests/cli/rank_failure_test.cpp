// A rank is killed: what the command says, and what the other ranks of a launcher's job say.

#include "cli/processes/rank_failure.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cli/command.hpp"
#include "cli/job_processes.hpp"
#include "cli/processes/free_port.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr int kSize = 4;
constexpr const char* kRun = "run --tokens 8 --steps 100000000";

std::string unique_word() {
  static int number = 0;
  return "CROSSDOCK_TEST_JOB=failure." + std::to_string(getpid()) + "." + std::to_string(++number);
}

// Kills a rank of the job with this word once it has the file.
void kill_rank(const std::string& word, int rank, const std::string& file) {
  std::vector<pid_t> found;
  EXPECT_TRUE(comes_true([&] {
    found = processes_with({word, "RANK=" + std::to_string(rank)});
    return !found.empty() && has_file(found[0], file);
  }));
  if (!found.empty()) kill(found[0], SIGKILL);
}

size_t count(const std::string& text, const std::string& part) {
  size_t number = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++number;
  return number;
}

// Reports arrive in pieces of any size, between lines of the results.
TEST(RankProgress, IsFoundInPieces) {
  const std::string whole =
      "one\n\n\x1f{\"done\": 1, \"words\": \"a\"}\ntwo\n\n\x1f{\"done\": 2, \"words\": "
      "\"b\"}\n\n\x1f"
      "{\"done\": 3, \"words\": \"c\"}\n\nthree\n";
  for (size_t size = 1; size <= whole.size(); ++size) {
    std::string output;
    size_t searched = 0;
    int64_t last = 0;
    for (size_t at = 0; at < whole.size(); at += size) {
      output += whole.substr(at, size);
      if (const auto progress = take_progress(output, searched)) last = progress->done;
      EXPECT_LE(searched, output.size());
    }
    EXPECT_EQ(last, 3) << size;
    EXPECT_EQ(output, "one\ntwo\n\nthree\n") << size;
    EXPECT_GE(searched + 1, output.size()) << size;
  }
}

using Victim = std::tuple<int, const char*>;  // the rank, and the command

class KilledRank : public testing::TestWithParam<Victim> {
 protected:
  const int victim_ = std::get<0>(GetParam());
  const std::string arguments_ = std::get<1>(GetParam());
  const std::string word_ = unique_word();
};

class InAJobOfTheCommand : public KilledRank {};

TEST_P(InAJobOfTheCommand, IsSaidOnceByTheCommand) {
  RunningCommand command(word_, arguments_ + " --communicator sockets --ranks 4");
  kill_rank(word_, victim_, "crossdock-streams");
  const CommandResult result = command.wait();
  const std::string message = "rank " + std::to_string(victim_) + " was ended by signal 9 (Killed)";
  EXPECT_EQ(result.status, 1);
  if (arguments_.find("--json") != std::string::npos) {
    EXPECT_EQ(result.out, "{\"error\": \"" + message + "\"}\n");
    EXPECT_THAT(result.err, IsEmpty());
  } else {
    EXPECT_EQ(count(result.err, message), 1) << result.err;
    EXPECT_THAT(result.err, StartsWith("crossdock "));
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
  }
}

constexpr const char* kBench =
    "bench --scenario decode --strategy direct --repeat 100000000 --warm-up 0";

INSTANTIATE_TEST_SUITE_P(Ranks, InAJobOfTheCommand,
                         testing::Values(Victim{0, kRun}, Victim{2, kRun},
                                         Victim{0, "run --tokens 8 --steps 100000000 --json"},
                                         Victim{2, "run --tokens 8 --steps 100000000 --json"},
                                         Victim{0, kBench},
                                         Victim{2, "verify --strategy direct --json"}));

class InAJobOfALauncher : public KilledRank {};

TEST_P(InAJobOfALauncher, IsSaidOnceByEverySurvivor) {
  const std::string job = word_ + " WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=" +
                          std::to_string(find_free_port()) + " RANK=";
  std::vector<std::unique_ptr<RunningCommand>> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.push_back(std::make_unique<RunningCommand>(job + std::to_string(rank), arguments_));
  }
  kill_rank(word_, victim_, "crossdock-window");  // in a call, after set-up
  const std::string cause = "rank " + std::to_string(victim_) + " left the group";
  const std::string opening = "cannot open the window of rank ";
  for (int rank = 0; rank < kSize; ++rank) {
    const CommandResult result = ranks[static_cast<size_t>(rank)]->wait();
    if (rank == victim_) continue;
    EXPECT_EQ(result.status, 1) << rank;
    const bool prints_results = rank == 0 && arguments_.starts_with("verify");
    const std::string& said = prints_results ? result.out : result.err;
    // A rank may be about to open the memory of the one that is killed, or of one that has noticed
    // it and ended.
    const bool was_opening = count(said, opening) > 0;
    EXPECT_EQ(count(said, was_opening ? opening : cause), 1) << rank << "\n" << said;
    if (prints_results) continue;
    EXPECT_THAT(said, HasSubstr(": rank " + std::to_string(rank) + (was_opening ? "" : " of 4: ")));
    const bool has_document = rank == 0 && arguments_.find("--json") != std::string::npos;
    EXPECT_EQ(count(result.out, "{\"error\": "), has_document ? 1 : 0) << result.out;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, InAJobOfALauncher,
                         testing::Values(Victim{0, kRun}, Victim{2, kRun},
                                         Victim{0, "run --tokens 8 --steps 100000000 --json"},
                                         Victim{2, "run --tokens 8 --steps 100000000 --json"},
                                         Victim{0, "verify --strategy direct"},
                                         Victim{2, "verify --strategy direct"}));

// A rank that cannot start its part, before there is a group.
TEST(KilledRankInSetUp, NamesTheRankThatSpeaks) {
  RunningCommand alone(
      "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 CROSSDOCK_ARRIVAL_DEADLINE=1 MASTER_PORT=" +
          std::to_string(find_free_port()),
      kRun);
  const CommandResult result = alone.wait();
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, StartsWith("crossdock run: rank 1"));
}

}  // namespace
}  // namespace crossdock::cli
