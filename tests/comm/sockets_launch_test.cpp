// How processes started by a launcher find each other: the environment and the store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "comm/sockets/launch.hpp"
#include "comm/sockets/socket.hpp"
#include "comm/sockets/store.hpp"
#include "comm/sockets_ranks.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

/// A port that is most likely followed by free ones.
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
