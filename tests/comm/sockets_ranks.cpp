#include "comm/sockets_ranks.hpp"

#include <gtest/gtest.h>

#include <barrier>
#include <thread>

namespace crossdock::testing {

SocketsOptions local_options() {
  return {.chunk_bytes = 4 << 10,
          .window_bytes = 16 << 10,
          .address = "127.0.0.1",
          .setup_deadline = kAmple};
}

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

void exchange(Communicator& communicator, int64_t block_bytes, std::chrono::nanoseconds deadline) {
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

}  // namespace crossdock::testing
