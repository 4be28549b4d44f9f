// Features of the sockets communicator only: blobs, simulated nodes, interrupts, forks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "comm/failure.hpp"
#include "comm/memory/window.hpp"
#include "comm/polled/process_end.hpp"
#include "comm/sockets/communicator.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/node_memory.hpp"
#include "comm/sockets_ranks.hpp"

namespace crossdock::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Sockets, MoveBytesOnANodeAndBetweenNodes) {
  for (const int ranks_per_node : {0, 1, 2}) {
    SocketsOptions options = local_options();
    options.ranks_per_node = ranks_per_node;
    run_threads(5, options, [&](Communicator& communicator) {
      EXPECT_EQ(communicator.name(), "sockets");
      EXPECT_EQ(communicator.topology().num_nodes,
                ranks_per_node == 0 ? 1 : (5 + ranks_per_node - 1) / ranks_per_node);
      for (const int64_t block_bytes : {0, 1, 100, 16384, 300001}) {
        exchange(communicator, block_bytes);
      }
    });
  }
}

/// Waits until all ranks have one connection with each far rank, and with rank 0, through which
/// they have joined. `num_settled`: number of such ranks; 0 at first.
void expect_one_connection_per_pair(const Communicator& communicator,
                                    std::atomic<int>& num_settled) {
  const auto& sockets = dynamic_cast<const comm::SocketsCommunicator&>(communicator);
  const auto& nodes = communicator.topology().node_of_rank;
  const auto self = static_cast<size_t>(communicator.rank());
  int num_pairs = 0;
  for (size_t peer = 0; peer < nodes.size(); ++peer) {
    const bool is_joined = self == 0 || peer == 0 || nodes[peer] != nodes[self];
    if (peer != self && is_joined) ++num_pairs;
  }
  const auto end = std::chrono::steady_clock::now() + kAmple;
  bool is_settled = false;
  while (num_settled < communicator.size() && std::chrono::steady_clock::now() < end) {
    sockets.endpoint().poll();
    if (is_settled || sockets.endpoint().num_connections() != num_pairs) continue;
    is_settled = true;
    ++num_settled;
  }
  EXPECT_EQ(sockets.endpoint().num_connections(), num_pairs);
}

TEST(Sockets, SubgroupsUseTheSameConnections) {
  SocketsOptions options = local_options();
  options.ranks_per_node = 2;
  std::array<std::atomic<int>, 2> num_settled{};
  run_threads(4, options, [&](Communicator& communicator) {
    exchange(communicator, 10);  // all open connections at once
    expect_one_connection_per_pair(communicator, num_settled[0]);
    const std::vector<int> even = {0, 2};
    const std::vector<int> odd = {1, 3};
    const auto half = communicator.subgroup(communicator.rank() % 2 == 0 ? even : odd);
    EXPECT_EQ(half->size(), 2);
    exchange(*half, 50000);
    exchange(communicator, 50000);
    exchange(*communicator.subgroup(communicator.rank() % 2 == 0 ? even : odd), 10);
    exchange(communicator, 10);
    expect_one_connection_per_pair(communicator, num_settled[1]);
    exchange(communicator, 10);  // nobody leaves before all have finished
  });
}

TEST(Sockets, ASubgroupThatOneRankCannotMakeIsTheSameErrorOnAllRanks) {
  for (const int ranks_per_node : {0, 2}) {
    SocketsOptions options = local_options();
    options.ranks_per_node = ranks_per_node;
    run_threads(4, options, [](Communicator& communicator) {
      auto& directory =
          dynamic_cast<const comm::SocketsCommunicator&>(communicator).endpoint().directory();
      uint64_t num_communicators = 0;
      if (communicator.rank() == 1) {
        const auto fill = [&] {
          for (; true; ++num_communicators)
            directory.publish(num_communicators + 1, /*descriptor=*/-1);
        };
        EXPECT_EQ(outcome_of(fill).code, ErrorCode::kCapacity);
      }
      const std::vector<int> all = {0, 1, 2, 3};
      const Outcome outcome = outcome_of([&] { exchange(*communicator.subgroup(all), 10); });
      EXPECT_EQ(outcome.code, ErrorCode::kCapacity) << outcome.message;
      EXPECT_EQ(outcome.culprit, 1);
      EXPECT_THAT(outcome.message, HasSubstr("at most 1024 groups"));
      for (uint64_t i = 0; i < num_communicators; ++i) directory.withdraw(i + 1);
      exchange(communicator, 10);
      exchange(*communicator.subgroup(all), 10);
      exchange(communicator, 10);  // nobody leaves before all have finished
    });
  }
}

TEST(Sockets, RanksThatMakeDifferentExchangesFindOutAtOnce) {
  for (const int gathering : {0, 1}) {
    run_threads(2, local_options(), [&](Communicator& communicator) {
      exchange(communicator, 10);
      const Buffer send(10);
      const Buffer recv(20);
      std::fill_n(send.data(), send.num_bytes(), std::byte{1});
      const std::vector<int64_t> offsets = {0, 10, 20};
      const WaitContext wait{
          .operation = "gather", .sequence = 1, .arrival = kAmple, .progress = kAmple};
      const Outcome outcome = outcome_of([&] {
        if (communicator.rank() != gathering) return exchange(communicator, 10);
        communicator.all_gather_v({send.data(), send.num_bytes(), send.owner()},
                                  {recv.data(), recv.num_bytes(), recv.owner()}, offsets, wait);
      });
      EXPECT_TRUE(outcome.threw);
      EXPECT_THAT(outcome.message, HasSubstr("in a different exchange from this rank's"));
    });
  }
}

TEST(Sockets, AWaitCanBeInterrupted) {
  for (const int ranks_per_node : {0, 1}) {
    std::atomic<bool> is_interrupted = false;
    std::atomic<bool> is_over = false;
    SocketsOptions options = local_options();
    options.ranks_per_node = ranks_per_node;
    options.interrupt = [&] { return is_interrupted.load(); };
    run_threads(2, options, [&](Communicator& communicator) {
      exchange(communicator, 10);
      if (communicator.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        is_interrupted = true;
        while (!is_over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      const Outcome outcome = outcome_of([&] { exchange(communicator, 10); });
      is_over = true;
      EXPECT_EQ(outcome.code, ErrorCode::kCommunication);
      EXPECT_EQ(outcome.culprit, 0);
      EXPECT_THAT(outcome.message, HasSubstr("interrupted in exchange (call 1)"));
    });
  }
}

TEST(Sockets, AForkedChildTellsThePeersNothing) {
  run_threads(1, local_options(), [](Communicator& communicator) { exchange(communicator, 10); });
  // Ranks as processes: one of them forks a child, which exits with its copy of the communicator.
  for (const int size : {2, 4}) {
    const auto outcomes = run_group(
        size,
        [](Group& group) {
          group.agree({.operation = "plan"});
          if (group.rank() == 0) {
            const pid_t child = fork();
            if (child == 0) {
              group.leave("the child says so");  // does nothing
              _exit(0);
            }
            waitpid(child, nullptr, 0);
          }
          group.agree({.operation = "dispatch"});
        },
        ample_deadlines());
    for (const Outcome& outcome : outcomes) EXPECT_FALSE(outcome.threw) << outcome.message;
  }
}

TEST(Sockets, AKilledRankIsNamedLongBeforeADeadline) {
  const int size = 4;
  const auto outcomes = run_group(
      size,
      [](Group& group) {
        group.agree({.operation = "plan"});
        if (group.rank() == 2) raise(SIGKILL);
        const auto begin = std::chrono::steady_clock::now();
        const Outcome outcome = outcome_of([&] { group.agree({.operation = "dispatch"}); });
        EXPECT_LT(std::chrono::steady_clock::now() - begin, kAmple / 2);
        EXPECT_EQ(outcome.culprit, 2) << outcome.message;
        EXPECT_EQ(outcome.code, ErrorCode::kPeerFailed) << outcome.message;
        const auto survivors = group.subgroup(std::vector<int>{0, 1, 3});
        survivors->agree({.operation = "plan"});
      },
      ample_deadlines());
  for (int rank = 0; rank < size; ++rank) {
    if (rank == 2) continue;
    EXPECT_FALSE(outcomes[static_cast<size_t>(rank)].threw)
        << outcomes[static_cast<size_t>(rank)].message;
  }
}

// The ranks have agreed on where the culprit's memory is, and it dies before they open it.
TEST(Sockets, AKilledRankIsNamedByRanksThatOpenItsMemory) {
  struct Shown {
    comm::ProcessIdentity process;
    comm::WindowHandle handle;
  };
  const int size = 3;
  const auto outcomes = run_group(
      size,
      [](Group& group) {
        comm::WindowPool& windows = comm::windows_of(group);
        const Buffer memory = windows.take(64);
        const std::vector own{
            Shown{comm::identify_this_process(), *windows.find(memory.data(), 64)}};
        const Agreement agreement =
            group.agree({.operation = "dispatch", .body = std::as_bytes(std::span(own))});
        if (group.rank() == 1) raise(SIGKILL);
        Shown lost{};
        std::memcpy(&lost, agreement.body(1).data(), sizeof lost);
        while (!comm::has_ended(lost.process))
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const Outcome outcome = outcome_of(
            [&] { run_agreed(group, [&] { static_cast<void>(windows.reach(1, lost.handle)); }); });
        EXPECT_EQ(outcome.culprit, 1) << outcome.message;
        EXPECT_EQ(outcome.operation, "dispatch");
        EXPECT_THAT(outcome.message, HasSubstr("cannot open the window of rank 1"));
      },
      ample_deadlines());
  for (const int rank : {0, 2}) {
    EXPECT_FALSE(outcomes[static_cast<size_t>(rank)].threw)
        << outcomes[static_cast<size_t>(rank)].message;
  }
}

TEST(Join, RefusesBlobsThatCannotBeRight) {
  SocketsBootstrap bootstrap(local_options());
  const std::vector<std::byte> own(bootstrap.blob().begin(), bootstrap.blob().end());
  const auto message_of = [&](const std::vector<std::vector<std::byte>>& blobs, int rank) {
    return outcome_of([&] { bootstrap.join(blobs, rank); }).message;
  };
  EXPECT_THAT(message_of({own}, 1), HasSubstr("rank must be from 0 to 0 for 1 blobs, got 1"));
  EXPECT_THAT(message_of({{}, own}, 0), HasSubstr("blob 0 must be this process's own"));
  EXPECT_THAT(message_of({own, {}}, 0), HasSubstr("the blob of rank 1 has 0 bytes"));
  auto foreign = own;
  foreign[4] ^= std::byte{1};
  EXPECT_THAT(message_of({own, foreign}, 0), HasSubstr("the blob of rank 1 has version"));
}

TEST(Join, NamesARankThatDoesNotCome) {
  SocketsOptions options = local_options();
  options.setup_deadline = kShort;
  SocketsBootstrap bootstrap(options);
  SocketsBootstrap absent(options);  // listens, and never joins
  const std::vector<std::vector<std::byte>> blobs = {
      {bootstrap.blob().begin(), bootstrap.blob().end()},
      {absent.blob().begin(), absent.blob().end()}};
  const Outcome outcome = outcome_of([&] { bootstrap.join(blobs, 0); });
  EXPECT_EQ(outcome.code, ErrorCode::kTimeout);
  EXPECT_EQ(outcome.culprit, 1);
  EXPECT_THAT(outcome.message, HasSubstr("waited 1 s for rank 1 to arrive at join"));
}

TEST(Join, NamesARankThatIsGone) {
  SocketsBootstrap bootstrap(local_options());
  std::vector<std::vector<std::byte>> blobs(2);
  blobs[0].assign(bootstrap.blob().begin(), bootstrap.blob().end());
  {
    const SocketsBootstrap gone(local_options());
    blobs[1].assign(gone.blob().begin(), gone.blob().end());
  }
  const Outcome outcome = outcome_of([&] { bootstrap.join(blobs, 0); });
  EXPECT_EQ(outcome.code, ErrorCode::kPeerFailed);
  EXPECT_EQ(outcome.culprit, 1);
  EXPECT_THAT(outcome.message, HasSubstr("cannot connect to its process"));
}

TEST(Join, RefusesABlobThatIsThereTwice) {
  SocketsBootstrap bootstrap(local_options());
  const std::vector<std::byte> own(bootstrap.blob().begin(), bootstrap.blob().end());
  const std::vector<std::vector<std::byte>> blobs = {own, own};
  EXPECT_THAT(outcome_of([&] { bootstrap.join(blobs, 0); }).message,
              HasSubstr("blobs 0 and 1 must differ"));
}

TEST(Join, StopsListeningIfAllRanksAreOnOneNode) {
  run_threads(3, local_options(), [](Communicator& communicator) {
    exchange(communicator, 10);
    EXPECT_EQ(communicator.topology().num_nodes, 1);
    EXPECT_EQ(sockets_counters(communicator).refused_connections, 0);
    EXPECT_EQ(sockets_note(communicator), "");
  });
}

TEST(Nodes, AreRanksThatAllShareMemory) {
  const std::vector<uint8_t> rows = {1, 1, 0, 1,   // rank 3 does not reach rank 1
                                     1, 1, 0, 1,   //
                                     0, 0, 1, 1,   //
                                     1, 0, 1, 1};  //
  EXPECT_THAT(comm::group_into_nodes(rows, 4), ElementsAre(0, 0, 1, 1));
}

}  // namespace
}  // namespace crossdock::testing
