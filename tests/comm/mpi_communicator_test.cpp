// Features of the MPI communicator only: chunks, the limit on requests, the caller's MPI_Comm.
#include <gtest/gtest.h>
#include <mpi.h>

#include "comm/group_runner.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::testing {
namespace {

/// Sends block_bytes to every rank and checks what arrives.
void exchange(Communicator& communicator, int64_t block_bytes) {
  const int size = communicator.size();
  std::vector<int64_t> offsets;
  for (int rank = 0; rank <= size; ++rank) offsets.push_back(rank * block_bytes);
  const Buffer send(offsets.back());
  const Buffer recv(offsets.back());
  const auto value_of = [](int source, int target, int64_t i) {
    return static_cast<std::byte>(source * 31 + target * 7 + i % 251);
  };
  for (int to = 0; to < size; ++to) {
    for (int64_t i = 0; i < block_bytes; ++i) {
      send.data()[to * block_bytes + i] = value_of(communicator.rank(), to, i);
    }
  }
  communicator.all_to_all_v(
      {send.data(), send.num_bytes(), send.owner()}, offsets,
      {recv.data(), recv.num_bytes(), recv.owner()}, offsets,
      {.operation = "exchange", .sequence = 1, .arrival = kAmple, .progress = kAmple});
  int64_t num_wrong = 0;
  for (int from = 0; from < size; ++from) {
    for (int64_t i = 0; i < block_bytes; ++i) {
      num_wrong += recv.data()[from * block_bytes + i] != value_of(from, communicator.rank(), i);
    }
  }
  EXPECT_EQ(num_wrong, 0);
}

int world_size() {
  return group_sizes().front();
}

TEST(MpiWindow, BoundsTheRequestsInFlightWhateverIsSent) {
  // Chunks that MPI sends immediately, and chunks for which it waits for the receiver.
  for (const int64_t chunk_bytes : {1000, 100000}) {
    for (const int window : {2, 3, 16}) {
      const auto communicator = make_mpi_communicator(
          {.chunk_bytes = chunk_bytes, .max_in_flight = window, .ranks_per_node = 0});
      exchange(*communicator, 40 * chunk_bytes + 1);
      const Traffic traffic = communicator->traffic();
      EXPECT_LE(traffic.max_requests_in_flight, window);
      EXPECT_EQ(traffic.requests_posted, 2 * 41 * (world_size() - 1));
      if (world_size() > 1) {
        EXPECT_EQ(traffic.max_requests_in_flight, window);
      }
    }
  }
}

/// Rank 0 is late until another rank has noticed, which it hears of in another communicator.
TEST(MpiCommunicators, AnnounceALongWaitWhenTheyAreMade) {
  if (world_size() < 2) GTEST_SKIP() << "needs another rank";
  const auto other = make_mpi_communicator(MpiOptions{});
  const int rank = other->rank();
  char token = 0;
  if (rank == 0) MPI_Recv(&token, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  std::vector<WaitNotice> notices;
  const OnWait on_wait = [&](const WaitNotice& notice) {
    notices.push_back(notice);
    if (rank == 1) MPI_Send(&token, 1, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
  };
  const auto made =
      make_mpi_communicator(MpiOptions{.setup_deadline = kAmple,
                                       .on_wait = on_wait,
                                       .notice_after = std::chrono::milliseconds(100)});
  if (rank == 1) {
    ASSERT_EQ(notices.size(), 1U);
    EXPECT_EQ(notices.front().rank, 1);
    EXPECT_EQ(notices.front().size, world_size());
    EXPECT_EQ(notices.front().operation, "set-up");
    EXPECT_EQ(notices.front().text().find("rank 1 of "), 0U);
  }
  exchange(*made, 10);
}

TEST(MpiCommunicators, MayBeMadeOfTheCallersOwn) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  const auto communicator = make_mpi_communicator(&half);
  MPI_Comm_free(&half);
  EXPECT_EQ(communicator->size(), (world_size() + 1 - rank % 2) / 2);
  exchange(*communicator, 1000);
}

TEST(MpiCommunicators, KnowTheirNodes) {
  EXPECT_EQ(make_mpi_communicator()->topology().num_nodes, 1);  // all processes of this test
  const auto pairs =
      make_mpi_communicator({.chunk_bytes = 1 << 20, .max_in_flight = 8, .ranks_per_node = 2});
  EXPECT_EQ(pairs->topology().num_nodes, (world_size() + 1) / 2);
  exchange(*pairs, 10);
  const bool has_neighbour = world_size() % 2 == 0 || pairs->rank() != world_size() - 1;
  const int num_near = has_neighbour ? 1 : 0;
  EXPECT_EQ(pairs->traffic().bytes_within_node, 10 * num_near);
  EXPECT_EQ(pairs->traffic().bytes_between_nodes, 10 * (world_size() - 1 - num_near));
}

TEST(MpiCommunicators, RejectOptionsThatCannotWork) {
  const auto message_of = [](const MpiOptions& options) {
    return outcome_of([&] { make_mpi_communicator(options); }).message;
  };
  EXPECT_EQ(message_of({.chunk_bytes = 0, .max_in_flight = 8, .ranks_per_node = 0}),
            "chunk_bytes must be from 1 to 1073741824, got 0");
  EXPECT_EQ(message_of({.chunk_bytes = 1, .max_in_flight = 1, .ranks_per_node = 0}),
            "max_in_flight must be at least 2 (one message each way), got 1");
  EXPECT_EQ(message_of({.chunk_bytes = 1, .max_in_flight = 8, .ranks_per_node = -1}),
            "ranks_per_node must be 0 (as MPI reports) or positive, got -1");
  const void* nothing = nullptr;
  EXPECT_EQ(outcome_of([&] { make_mpi_communicator(nothing); }).message,
            "mpi_comm must point to an MPI_Comm, got null");
}

TEST(Mpi, IsKnownToBeLaunched) {
  EXPECT_TRUE(mpi_is_built());
  EXPECT_TRUE(mpi_is_launched());
}

}  // namespace
}  // namespace crossdock::testing
