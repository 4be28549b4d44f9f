// Set-up that fails: every rank that has started names the same rank, in time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <thread>

#include "comm/sockets/socket.hpp"
#include "comm/sockets_ranks.hpp"

namespace crossdock::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int kRanks = 4;

/// Waits until the condition is true, at most for kAmple.
template <typename Condition>
void await(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kAmple;
  while (!condition() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// A job of processes, some of which start.
class StartedJob {
 public:
  StartedJob() {
    const auto listener = comm::listen_at(*comm::parse_address("127.0.0.1", 0));
    port_ = std::min(comm::address_of(*listener).port, 65000);
  }
  ~StartedJob() {
    for (const auto& [rank, process] : processes_) kill(process, SIGKILL);
    for (const auto& [rank, process] : processes_) waitpid(process, nullptr, 0);
  }
  StartedJob(const StartedJob&) = delete;
  StartedJob& operator=(const StartedJob&) = delete;

  int port() const { return port_; }

  void start(int rank, const SocketsOptions& options) {
    const pid_t process = fork();
    if (process > 0) processes_[rank] = process;
    if (process != 0) return;
    const Outcome outcome = outcome_of([&] {
      const auto communicator = make_sockets_communicator({.rank = rank,
                                                           .size = kRanks,
                                                           .master_address = "127.0.0.1",
                                                           .master_port = port_,
                                                           .job = std::to_string(getppid())},
                                                          options);
      exchange(*communicator, 1000);
    });
    std::ofstream(file_of(rank)) << outcome.culprit << " " << outcome.message;
    _exit(0);
  }

  /// "culprit message" of a rank that has ended.
  std::string end_of(int rank) {
    waitpid(processes_.at(rank), nullptr, 0);
    processes_.erase(rank);
    std::ifstream file(file_of(rank));
    const std::string text(std::istreambuf_iterator<char>(file), {});
    std::filesystem::remove(file_of(rank));
    return text;
  }

 private:
  std::string file_of(int rank) const {
    return ::testing::TempDir() + "setup_" + std::to_string(port_) + "." + std::to_string(rank);
  }

  int port_ = 0;
  std::map<int, pid_t> processes_;
};

SocketsOptions options_with(std::chrono::nanoseconds deadline) {
  return {.address = "127.0.0.1", .setup_deadline = deadline};
}

TEST(SetUp, AllRanksNameTheSameMissingRanks) {
  constexpr std::chrono::seconds kDeadline{6};
  const std::vector<std::pair<std::vector<int>, std::string>> known = {
      {{0}, "for rank 0 at 127.0.0.1, port "},
      {{1}, "for rank 1 to start"},
      {{2}, "for rank 2 to start"},
      {{3}, "for rank 3 to start"},
      {{1, 3}, "for ranks 1, 3 to start"},
      {{0, 2}, "for rank 0 at 127.0.0.1, port "}};
  std::vector<StartedJob> jobs(known.size());  // all at once: each takes as long as the deadline
  const auto is_missing = [&](size_t job, int rank) {
    return std::ranges::find(known[job].first, rank) != known[job].first.end();
  };
  for (size_t job = 0; job < jobs.size(); ++job) {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (!is_missing(job, rank)) jobs[job].start(rank, options_with(kDeadline));
    }
  }
  for (size_t job = 0; job < jobs.size(); ++job) {
    const std::string port = known[job].first.front() == 0 ? std::to_string(jobs[job].port()) : "";
    for (int rank = 0; rank < kRanks; ++rank) {
      if (is_missing(job, rank)) continue;
      EXPECT_THAT(jobs[job].end_of(rank),
                  AllOf(StartsWith(std::to_string(known[job].first.front()) + " rank " +
                                   std::to_string(rank) + " of 4: waited 6 s "),
                        HasSubstr(known[job].second + port + "; are all processes running")));
    }
  }
}

TEST(SetUp, ARankThatCannotTakePartTellsAllOthersWhy) {
  for (const int refusing : {0, 2}) {
    StartedJob job;
    for (int rank = 0; rank < kRanks; ++rank) {
      SocketsOptions options = options_with(kAmple);
      if (rank == refusing) options.window_bytes = 0;
      job.start(rank, options);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string end = job.end_of(rank);
      EXPECT_THAT(end, HasSubstr("window_bytes must be from 1 to"));
      if (rank == refusing) continue;
      EXPECT_THAT(end, StartsWith(std::to_string(refusing) + " rank " + std::to_string(rank) +
                                  " of 4: rank " + std::to_string(refusing) + " gave up: "));
    }
  }
}

TEST(SetUp, OtherOptionsOfOneRankAreNamedByAll) {
  StartedJob job;
  for (int rank = 0; rank < kRanks; ++rank) {
    SocketsOptions options = options_with(kAmple);
    if (rank == 3) options.window_bytes = 1 << 16;
    job.start(rank, options);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(job.end_of(rank), StartsWith("3 rank 3 has window_bytes=65536"));
  }
}

/// Rank 2 gives up while it joins the others, which are past that part of the set-up by then.
TEST(SetUp, RanksThatAreFurtherLearnWhyARankGaveUp) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::vector<std::byte>> blobs(3);
  std::vector<Outcome> outcomes(3);
  std::atomic<int> num_blobs = 0;
  std::atomic<bool> rank_2_waits = false;
  std::atomic<bool> rank_1_is_further = false;
  const auto join = [&](int rank) {
    SocketsOptions options = local_options();
    if (rank == 1) {  // a rank that waits for the memory of the others asks every millisecond
      options.interrupt = [&, last = Clock::time_point{}]() mutable {
        const auto before = std::exchange(last, Clock::now());
        if (last - before < std::chrono::milliseconds(20)) rank_1_is_further = true;
        return false;
      };
    }
    if (rank == 2) {  // asked every 50 ms; after a second it waits for what rank 0 finds out
      options.interrupt = [&, num_calls = 0]() mutable {
        if (++num_calls < 20) return false;
        rank_2_waits = true;
        await([&] { return rank_1_is_further.load(); });
        return true;
      };
    }
    SocketsBootstrap bootstrap(options);
    blobs[static_cast<size_t>(rank)].assign(bootstrap.blob().begin(), bootstrap.blob().end());
    ++num_blobs;
    await([&] { return num_blobs == 3 && (rank != 1 || rank_2_waits); });
    outcomes[static_cast<size_t>(rank)] = outcome_of([&] { bootstrap.join(blobs, rank); });
  };
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 3; ++rank) ranks.emplace_back(join, rank);
  }
  EXPECT_THAT(outcomes[2].message, HasSubstr("rank 2 of 3: interrupted in join"));
  for (const int rank : {0, 1}) {
    const Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    EXPECT_EQ(outcome.culprit, 2);
    EXPECT_THAT(outcome.message,
                AllOf(HasSubstr("interrupted in join"), Not(HasSubstr("left the group"))));
  }
}

/// The interrupt comes while this rank waits, and the late rank does its part at the same moment.
TEST(SetUp, AnInterruptIsNotLostIfTheLateRankArrivesMeanwhile) {
  std::atomic<bool> is_armed = false;
  std::atomic<bool> rank_1_may_start = false;
  std::atomic<bool> rank_1_has_arrived = false;
  std::vector<std::vector<std::byte>> blobs(2);
  std::vector<Outcome> outcomes(2);
  std::atomic<int> num_blobs = 0;
  const auto run = [&](int rank) {
    SocketsOptions options = local_options();
    options.interrupt = [&, rank] {
      if (!is_armed) return false;
      if (rank == 1) {  // it waits for rank 0, so its own part is done
        rank_1_has_arrived = true;
        return false;
      }
      rank_1_may_start = true;
      await([&] { return rank_1_has_arrived.load(); });
      return true;
    };
    SocketsBootstrap bootstrap(options);
    blobs[static_cast<size_t>(rank)].assign(bootstrap.blob().begin(), bootstrap.blob().end());
    ++num_blobs;
    await([&] { return num_blobs == 2; });
    const auto world = bootstrap.join(blobs, rank);
    exchange(*world, 100);
    if (rank == 0) is_armed = true;
    if (rank == 1) await([&] { return rank_1_may_start.load(); });
    const std::vector<int> both = {0, 1};
    outcomes[static_cast<size_t>(rank)] = outcome_of([&] { world->subgroup(both); });
  };
  {
    std::jthread rank_0(run, 0);
    std::jthread rank_1(run, 1);
  }
  EXPECT_EQ(outcomes[0].code, ErrorCode::kCommunication);
  EXPECT_EQ(outcomes[0].message,
            "rank 0 of 2: interrupted while waiting for rank 1 to make the communicator");
  EXPECT_EQ(outcomes[1].culprit, 0);
  EXPECT_THAT(outcomes[1].message, HasSubstr("rank 0 gave up: interrupted while waiting"));
}

}  // namespace
}  // namespace crossdock::testing
