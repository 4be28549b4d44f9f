// One of several processes that share the GPUs is killed: all others get the same error, which
// names its rank, long before a deadline, and continue without it.
//
// A test runs first in the process that starts the ranks and checks how they end, and then in each
// of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/polled/process_end.hpp"
#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/fatal_communicator.hpp"
#include "dispatch/cuda/sharing.hpp"
#include "support/failure_printer.hpp"
#include "support/process_communicator.hpp"
#include "support/rank_processes.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

constexpr int kNumRanks = 4;
constexpr int kVictim = 3;
constexpr std::chrono::seconds kJobDeadline{240};
constexpr std::chrono::hours kNever{1};  // the library's deadlines: longer than any job

bool is_rank = false;  // or the process that starts the ranks
std::string program;

/// A rank of the job.
struct Member {
  FatalCommunicator& communicator;
  Group group;
  std::unique_ptr<Group> rest;  // all ranks but the victim; null on the victim

  Member() : Member(std::make_unique<FatalCommunicator>(testing::make_process_communicator())) {}

  bool is_victim() const { return group.rank() == kVictim; }

  /// The victim does not return. The others return when no rank needs it any more; by then it has
  /// been killed or is about to be.
  void kill_victim() {
    const std::vector self{comm::identify_this_process()};
    victim_ = exchange(group, self, kVictim)[0];
    while (is_victim()) pause();
    rest->agree({.operation = "ready to lose a rank"});
    if (group.rank() == 0) kill(victim_.pid, SIGKILL);
  }

  /// Returns when the victim has ended, after kill_victim.
  void await_death() const {
    while (!comm::has_ended(victim_)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rest->agree({.operation = "a rank is lost"});
  }

 private:
  explicit Member(std::unique_ptr<FatalCommunicator> own)
      : communicator(*own),
        group(std::move(own), {.arrival_deadline = kNever, .progress_deadline = kNever}) {
    if (!is_victim()) rest = group.subgroup(std::vector<int>{0, 1, 2});
  }

  comm::ProcessIdentity victim_;
};

DispatchCase case_of(const Group& group, bool has_max_rows = true) {
  DispatchConfig config{.num_experts = 9, .top_k = 2, .width = 72};
  if (has_max_rows) config.max_rows = 400;
  return random_case(config, std::vector<int64_t>(static_cast<size_t>(group.size()), 40), 51);
}

void expect_waiting(const GpuRank& rank) {
  EXPECT_EQ(cudaStreamQuery(rank.stream.get()), cudaErrorNotReady);
  cudaGetLastError();
}

/// The error that a rank gets for a call: in the call, or later.
std::optional<Error> late_error(GpuRank& rank, const std::function<void()>& call) {
  return error_of([&] {
    call();
    rank.stream.synchronize();
    rank.dispatcher.check();
  });
}

void expect_named(const Member& member, const std::optional<Error>& error) {
  EXPECT_TRUE(error.has_value());
  EXPECT_TRUE(member.group.is_poisoned());
  if (!error) return;
  EXPECT_EQ(error->code(), ErrorCode::kPeerFailed) << error->what();
  EXPECT_EQ(error->context().culprit, kVictim) << error->what();
  EXPECT_THAT(error->what(), HasSubstr("rank 3 "));
}

// The message without the rank that reports it.
std::vector<char> text_of(const std::optional<Error>& error) {
  const std::string message = error ? error->what() : "no error";
  const std::string text = message.substr(message.find(": ") + 1);
  return {text.begin(), text.end()};
}

/// The error that the device of every survivor found while it waited in `operation`.
void expect_same_error(const Member& member, GpuRank& rank, const std::optional<Error>& error,
                       const std::string& operation) {
  expect_named(member, error);
  if (error) {
    EXPECT_EQ(error->context().operation, operation) << error->what();
    EXPECT_EQ(message_of([&] { static_cast<void>(rank.plan()); }), error->what());
  }
  EXPECT_EQ(text_of(error), exchange(*member.rest, text_of(error), 0));
}

/// Expects that the survivors' GPUs still work.
void expect_survivors_work(const Member& member) {
  const DispatchCase the_case = case_of(*member.rest);
  const StepBytes wanted = cpu_step(*member.rest, the_case, DType::kF32);
  GpuRank rank(*member.rest, the_case, {});
  for (int step = 0; step < 2; ++step) {
    const QueuedStep queued(rank.dispatcher, rank.tensors);
    expect_same(queued.wait(rank.stream), wanted);
  }
  rank.dispatcher.check();
}

class CudaKilledProcess : public CudaSharing {
 protected:
  /// Runs a test in the ranks. The victim must be killed in it.
  static void run(const std::function<void(Member&)>& test) {
    if (!is_rank) return expect_only_the_victim_is_killed();
    share_by("fd");
    Member member;
    test(member);
    EXPECT_FALSE(member.is_victim()) << "it should have been killed";
    // No process ends while another may still use its memory.
    if (member.rest) member.rest->agree({.operation = "end"});
  }

 private:
  static void expect_only_the_victim_is_killed() {
    const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
    const auto deadline = std::chrono::steady_clock::now() + kJobDeadline;
    const testing::RankProcesses ranks(
        kNumRanks,
        {program, std::string("--gtest_filter=") + test.test_suite_name() + "." + test.name()});
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const std::optional<int> status = ranks.wait_for(rank, deadline);
      EXPECT_TRUE(status.has_value()) << "rank " << rank;
      if (!status) continue;
      if (rank == kVictim) {
        EXPECT_TRUE(WIFSIGNALED(*status) && WTERMSIG(*status) == SIGKILL) << *status;
      } else {
        EXPECT_TRUE(WIFEXITED(*status) && WEXITSTATUS(*status) == 0) << "rank " << rank;
      }
    }
  }
};

// The first step connects the ranks; later ones run ahead.
void make_a_step(GpuRank& rank) {
  { const QueuedStep connects(rank.dispatcher, rank.tensors); }
  rank.stream.synchronize();
  rank.dispatcher.check();
}

TEST_F(CudaKilledProcess, IsNamedIfItDiesBetweenCalls) {
  run([](Member& member) {
    GpuRank rank(member.group, case_of(member.group), {});
    make_a_step(rank);
    member.kill_victim();
    member.await_death();
    const std::optional<Error> error =
        late_error(rank, [&] { const QueuedStep step(rank.dispatcher, rank.tensors); });
    expect_same_error(member, rank, error, "plan");
    expect_survivors_work(member);
  });
}

TEST_F(CudaKilledProcess, IsNamedByRanksThatWaitInAPlan) {
  run([](Member& member) {
    GpuRank rank(member.group, case_of(member.group), {});
    make_a_step(rank);
    std::optional<QueuedStep> step;
    if (!member.is_victim()) {
      step.emplace(rank.dispatcher, rank.tensors);
      expect_waiting(rank);
    }
    member.kill_victim();
    expect_same_error(member, rank, late_error(rank, [] {}), "plan");
    expect_survivors_work(member);
  });
}

TEST_F(CudaKilledProcess, IsNamedByRanksThatWaitInADispatch) {
  run([](Member& member) {
    GpuRank rank(member.group, case_of(member.group), {});
    make_a_step(rank);
    const Plan plan = rank.plan();
    rank.stream.synchronize();
    std::optional<QueuedStep> step;
    if (!member.is_victim()) {
      step.emplace(rank.dispatcher, plan, rank.tensors);
      expect_waiting(rank);
    }
    member.kill_victim();
    expect_same_error(member, rank, late_error(rank, [] {}), "dispatch");
    expect_survivors_work(member);
  });
}

// Rank 2 finds out from the others, whose kernels have given up: it must not name them.
TEST_F(CudaKilledProcess, IsNamedByARankThatArrivesAfterTheOthersHaveGivenUp) {
  run([](Member& member) {
    GpuRank rank(member.group, case_of(member.group), {});
    make_a_step(rank);
    const bool is_late = member.group.rank() == 2;
    std::optional<QueuedStep> step;
    if (!member.is_victim() && !is_late) {
      step.emplace(rank.dispatcher, rank.tensors);
      expect_waiting(rank);
    }
    member.kill_victim();
    if (!is_late) rank.stream.synchronize();
    member.rest->agree({.operation = "given up"});
    const std::optional<Error> error = late_error(rank, [&] {
      if (is_late) step.emplace(rank.dispatcher, rank.tensors);
    });
    expect_same_error(member, rank, error, "plan");
    expect_survivors_work(member);
  });
}

TEST_F(CudaKilledProcess, IsNamedByRanksThatReplayAGraph) {
  run([](Member& member) {
    const DispatchCase the_case = case_of(member.group);
    const StepBytes wanted = cpu_step(member.group, the_case, DType::kF32);
    GpuRank rank(member.group, the_case, {});
    make_a_step(rank);
    std::optional<QueuedStep> queued;
    const CapturedGraph graph(rank, [&] { queued.emplace(rank.dispatcher, rank.tensors); });
    graph.launch();
    expect_same(queued->wait(rank.stream), wanted);
    if (!member.is_victim()) {
      for (int replay = 0; replay < 3; ++replay) graph.launch();
      expect_waiting(rank);
    }
    member.kill_victim();
    expect_same_error(member, rank, late_error(rank, [] {}), "plan");
    expect_survivors_work(member);
  });
}

// Without max_rows the hosts meet in every call. The victim has made the call, but its stream is
// blocked forever.
TEST_F(CudaKilledProcess, IsNamedByRanksWhoseHostsHaveMetIt) {
  run([](Member& member) {
    GpuRank rank(member.group, case_of(member.group, /*has_max_rows=*/false), {});
    make_a_step(rank);
    const Plan plan = rank.plan();
    rank.stream.synchronize();
    const auto wait_for_ever = [](void*) {
      while (true) pause();
    };
    if (member.is_victim()) cuda_ok(cudaLaunchHostFunc(rank.stream.get(), wait_for_ever, nullptr));
    const DispatchResult moved = rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view});
    expect_waiting(rank);
    member.kill_victim();
    expect_same_error(member, rank, late_error(rank, [] {}), "dispatch");
    expect_survivors_work(member);
  });
}

/// The victim dies instead of making an exchange of its first plan, the one with this number.
class CudaKilledProcessAtSetUp : public CudaKilledProcess,
                                 public ::testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(Exchange, CudaKilledProcessAtSetUp, ::testing::Values(1, 3, 5, 7, 9, 12));

TEST_P(CudaKilledProcessAtSetUp, IsNamed) {
  run([](Member& member) {
    GpuRank rank(member.group, case_of(member.group), {});
    if (member.is_victim()) member.communicator.set_exchanges_left(GetParam() - 1);
    const std::optional<Error> error = error_of([&] { static_cast<void>(rank.plan()); });
    if (member.is_victim()) return;
    expect_named(member, error);
    expect_survivors_work(member);
  });
}

}  // namespace
}  // namespace crossdock

int main(int argc, char** argv) {
  crossdock::program = argv[0];
  crossdock::is_rank = std::string(argv[argc - 1]) == crossdock::testing::kAsRank;
  ::testing::InitGoogleTest(&argc, argv);
  if (crossdock::is_rank) crossdock::testing::print_only_failures(std::atoi(std::getenv("RANK")));
  return RUN_ALL_TESTS();
}
