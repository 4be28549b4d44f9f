// Shared by the tests of processes that map each other's GPU memory.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "comm/cuda/peer_memory.hpp"
#include "crossdock/group.hpp"
#include "dispatch/cuda/step.hpp"
#include "dispatch/cuda/tensors.hpp"

namespace crossdock {

class CudaSharing : public CudaTest {
 protected:
  void TearDown() override { share_by(nullptr); }
  // Sets CROSSDOCK_PEER_MEMORY; null: unsets it.
  static void share_by(const char* setting) {
    if (setting == nullptr) {
      unsetenv("CROSSDOCK_PEER_MEMORY");
    } else {
      setenv("CROSSDOCK_PEER_MEMORY", setting, /*overwrite=*/1);
    }
  }
};

inline GroupOptions deadlines() {
  return short_deadlines().group;
}

template <typename Item>
std::vector<Item> exchange(Group& group, const std::vector<Item>& own, int whose) {
  const Agreement agreement =
      group.agree({.operation = "exchange", .body = std::as_bytes(std::span(own))});
  const std::span<const std::byte> bytes = agreement.body(whose);
  std::vector<Item> items(bytes.size() / sizeof(Item));
  std::memcpy(items.data(), bytes.data(), bytes.size());
  return items;
}

// Address, on this rank, of the memory that rank 0 shows in this call.
inline const std::byte* reach_first_rank(Group& group, cuda::PeerMemory& peers,
                                         const Buffer& memory) {
  const cuda::MemoryBlock block{.base = memory.data(), .num_bytes = memory.num_bytes()};
  const std::vector<cuda::MemoryHandle> shown{peers.show(memory.data(), block)};
  const std::vector<cuda::ChunkNotice> news = peers.news();
  const auto heard = exchange(group, news, 0);
  peers.note_heard(news);
  peers.hear(0, heard);
  return peers.reach(0, exchange(group, shown, 0)[0]);
}

inline std::vector<unsigned char> read(const std::byte* from, int64_t num_bytes,
                                       const RankStream& stream) {
  std::vector<unsigned char> bytes(static_cast<size_t>(num_bytes));
  cuda_ok(cudaMemcpyAsync(bytes.data(), from, bytes.size(), cudaMemcpyDeviceToHost, stream.get()));
  stream.synchronize();
  return bytes;
}

inline void write(const Buffer& to, int value, const RankStream& stream) {
  const auto num_bytes = static_cast<size_t>(to.num_bytes());
  cuda_ok(cudaMemsetAsync(to.data(), value, num_bytes, stream.get()));
  stream.synchronize();
}

}  // namespace crossdock
