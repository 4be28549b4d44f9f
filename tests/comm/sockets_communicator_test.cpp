// What only the sockets communicator has: blobs, the store, simulated nodes, interrupts, forks. The
// ranks are threads here, each with a bootstrap of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "comm/group_runner.hpp"
#include "comm/sockets/blob.hpp"
#include "comm/sockets/launch.hpp"
#include "comm/sockets/nodes.hpp"
#include "comm/sockets/socket.hpp"
#include "comm/sockets/store.hpp"
#include "crossdock/sockets.hpp"

namespace crossdock::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

SocketsOptions local_options() {
  return {.chunk_bytes = 4 << 10,
          .window_bytes = 16 << 10,
          .address = "127.0.0.1",
          .setup_deadline = kAmple};
}

/// Runs body on `size` ranks that have joined each other.
void run_threads(int size, const SocketsOptions& options,
                 const std::function<void(Communicator&)>& body) {
  std::vector<std::vector<std::byte>> blobs(static_cast<size_t>(size));
  std::barrier all_have_blobs(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      SocketsBootstrap bootstrap(options);
      blobs[static_cast<size_t>(rank)].assign(bootstrap.blob().begin(), bootstrap.blob().end());
      all_have_blobs.arrive_and_wait();
      const auto outcome = outcome_of([&] { body(*bootstrap.join(blobs, rank)); });
      EXPECT_FALSE(outcome.threw) << "rank " << rank << ": " << outcome.message;
    });
  }
}

/// Sends block_bytes to every rank and checks what arrives.
void exchange(Communicator& communicator, int64_t block_bytes,
              std::chrono::nanoseconds deadline = kAmple) {
  const int size = communicator.size();
  std::vector<int64_t> offsets;
  for (int rank = 0; rank <= size; ++rank) offsets.push_back(rank * block_bytes);
  const Buffer send(offsets.back());
  const Buffer recv(offsets.back());
  for (int to = 0; to < size; ++to) {
    for (int64_t i = 0; i < block_bytes; ++i) {
      send.data()[to * block_bytes + i] =
          static_cast<std::byte>(communicator.rank() * 31 + to * 7 + i % 251);
    }
  }
  communicator.all_to_all_v(
      {send.data(), send.num_bytes(), send.owner()}, offsets,
      {recv.data(), recv.num_bytes(), recv.owner()}, offsets,
      {.operation = "exchange", .sequence = 1, .arrival = deadline, .progress = deadline});
  int64_t num_wrong = 0;
  for (int from = 0; from < size; ++from) {
    for (int64_t i = 0; i < block_bytes; ++i) {
      num_wrong += recv.data()[from * block_bytes + i] !=
                   static_cast<std::byte>(from * 31 + communicator.rank() * 7 + i % 251);
    }
  }
  EXPECT_EQ(num_wrong, 0);
}

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

TEST(Sockets, SubgroupsUseTheSameConnections) {
  SocketsOptions options = local_options();
  options.ranks_per_node = 2;
  run_threads(4, options, [](Communicator& communicator) {
    const std::vector<int> even = {0, 2};
    const std::vector<int> odd = {1, 3};
    const auto half = communicator.subgroup(communicator.rank() % 2 == 0 ? even : odd);
    EXPECT_EQ(half->size(), 2);
    exchange(*half, 50000);
    exchange(communicator, 50000);
    exchange(*communicator.subgroup(communicator.rank() % 2 == 0 ? even : odd), 10);
    exchange(communicator, 10);  // nobody leaves before all have finished
  });
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
      EXPECT_THAT(outcome.message, HasSubstr("in another exchange than this rank's"));
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

TEST(Join, RefusesBlobsThatCannotBeRight) {
  SocketsBootstrap bootstrap(local_options());
  const std::vector<std::byte> own(bootstrap.blob().begin(), bootstrap.blob().end());
  const auto message_of = [&](const std::vector<std::vector<std::byte>>& blobs, int rank) {
    return outcome_of([&] { bootstrap.join(blobs, rank); }).message;
  };
  EXPECT_THAT(message_of({own}, 1), HasSubstr("rank must be from 0 to 0 for 1 blobs, got 1"));
  EXPECT_THAT(message_of({{}, own}, 0), HasSubstr("blob 0 must be the one of this process"));
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

/// A port with free ones behind it, most likely.
int some_port() {
  const auto listener = comm::listen_at(*comm::parse_address("127.0.0.1", 0));
  return std::min(comm::address_of(*listener).port, 65000);
}

TEST(Store, BringsAllBlobsToAllRanks) {
  const int port = some_port();
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([=] {
      const auto blobs =
          comm::exchange_blobs({.host = "127.0.0.1",
                                .port = port,
                                .key = 5,
                                .rank = rank,
                                .size = 4,
                                .blob = std::vector<std::byte>(100, static_cast<std::byte>(rank)),
                                .deadline = kAmple,
                                .interrupt = {}});
      ASSERT_EQ(blobs.size(), 4U);
      for (size_t i = 0; i < blobs.size(); ++i) {
        EXPECT_EQ(blobs[i], std::vector<std::byte>(100, static_cast<std::byte>(i)));
      }
    });
  }
}

TEST(Store, NamesTheRanksThatAreMissing) {
  const Outcome outcome = outcome_of([] {
    comm::exchange_blobs({.host = "127.0.0.1",
                          .port = 23456,
                          .key = 5,
                          .rank = 0,
                          .size = 3,
                          .blob = std::vector<std::byte>(100),
                          .deadline = kShort,
                          .interrupt = {}});
  });
  EXPECT_EQ(outcome.code, ErrorCode::kTimeout);
  EXPECT_THAT(outcome.message, HasSubstr("waited 1 s for ranks 1, 2 to start"));
}

TEST(Launch, StartsProcessesThatFindEachOtherByThePort) {
  const int size = 3;
  const int port = some_port();
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    processes.push_back(fork());
    if (processes.back() != 0) continue;
    const Outcome outcome = outcome_of([&] {
      for (int round = 0; round < 2; ++round) {  // one communicator after another
        const auto communicator = make_sockets_communicator({.rank = rank,
                                                             .size = size,
                                                             .master_address = "127.0.0.1",
                                                             .master_port = port,
                                                             .job = "test"},
                                                            {.setup_deadline = kAmple});
        exchange(*communicator, 1000);
      }
    });
    if (outcome.threw) std::fprintf(stderr, "rank %d: %s\n", rank, outcome.message.c_str());
    _exit(outcome.threw || ::testing::Test::HasFailure() ? 1 : 0);
  }
  for (const pid_t process : processes) {
    int status = -1;
    waitpid(process, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

TEST(Launch, KnowsTheFirstHostOfANodeList) {
  EXPECT_EQ(comm::first_host("gpu7"), "gpu7");
  EXPECT_EQ(comm::first_host("gpu7,gpu9"), "gpu7");
  EXPECT_EQ(comm::first_host("gpu[07-09,12],login"), "gpu07");
  EXPECT_EQ(comm::first_host("gpu[3]-ib,x"), "gpu3-ib");
  EXPECT_EQ(comm::first_host("rack[1-2]node[05,7]"), "rack1node05");
}

TEST(Launch, ReadsTheEnvironment) {
  setenv("RANK", "1", 1);
  setenv("WORLD_SIZE", "4", 1);
  setenv("MASTER_ADDR", "host", 1);
  setenv("MASTER_PORT", "29500", 1);
  const auto launch = sockets_launch_from_environment();
  ASSERT_TRUE(launch.has_value());
  EXPECT_EQ(launch->rank, 1);
  EXPECT_EQ(launch->size, 4);
  EXPECT_EQ(launch->master_address, "host");
  EXPECT_EQ(launch->master_port, 29500);
  setenv("RANK", "4", 1);
  EXPECT_EQ(outcome_of([] { sockets_launch_from_environment(); }).message,
            "RANK must be a number from 0 to 3, got '4'");
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) unsetenv(name);
  EXPECT_FALSE(sockets_launch_from_environment().has_value());
}

TEST(Launch, ReadsTheEnvironmentOfSlurm) {
  setenv("SLURM_PROCID", "2", 1);
  setenv("SLURM_NTASKS", "16", 1);
  setenv("SLURM_JOB_ID", "77", 1);
  EXPECT_FALSE(sockets_launch_from_environment().has_value());  // a batch script
  setenv("SLURM_STEP_NODELIST", "gpu[07-09]", 1);
  setenv("SLURM_STEP_NUM_TASKS", "4", 1);
  const auto launch = sockets_launch_from_environment();
  ASSERT_TRUE(launch.has_value());
  EXPECT_EQ(launch->rank, 2);
  EXPECT_EQ(launch->size, 4);
  EXPECT_EQ(launch->master_address, "gpu07");
  EXPECT_GE(launch->master_port, 20000);
  for (const char* name : {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_NODELIST",
                           "SLURM_STEP_NUM_TASKS"}) {
    unsetenv(name);
  }
}

}  // namespace
}  // namespace crossdock::testing
