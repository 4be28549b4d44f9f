#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/descriptor_socket.hpp"
#include "comm/secret.hpp"
#include "core/cuda/range_arena.hpp"

namespace crossdock::cuda {

/// What a process must know to map an arena of another one: plain data.
struct ArenaCard {
  comm::Secret id{};
  comm::DescriptorAddress address{};  // with kDescriptors: where its chunks are passed
  int64_t capacity = 0;               // most bytes that it can have
};

/// Tells other processes of a chunk of an arena: plain data.
struct ChunkNotice {
  int64_t index = 0;
  int64_t num_bytes = 0;
  CUmemFabricHandle fabric{};  // with kFabric: what to open it with
};

/// An arena of this process as other processes see it. Thread-safe.
class SharedArena {
 public:
  /// The one of a device, with its arena. REQUIRES: sharing is kDescriptors or kFabric. Throws if
  /// the device or the system does not allow this kind of sharing.
  static SharedArena& of(int device, MemorySharing sharing);
  explicit SharedArena(std::shared_ptr<RangeArena> arena);
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  const RangeArena& arena() const { return *arena_; }
  const ArenaCard& card() const { return card_; }

  /// The chunks from `first` on. With kDescriptors they are also passed to all processes that have
  /// connected and do not have them yet. Does not wait.
  std::vector<ChunkNotice> announce(size_t first);

 private:
  struct Peer {
    comm::DescriptorConnection connection;
    size_t num_passed = 0;  // chunks
  };
  void pass_to(Peer& peer, size_t num_chunks) const;

  std::shared_ptr<RangeArena> arena_;
  ArenaCard card_;
  std::mutex mutex_;
  std::optional<comm::DescriptorListener> listener_;  // with kDescriptors
  std::vector<Peer> peers_;
};

/// For tests: while one exists, this process shares no virtual memory.
class NoSharedArenas {
 public:
  NoSharedArenas();
  ~NoSharedArenas();
  NoSharedArenas(const NoSharedArenas&) = delete;
  NoSharedArenas& operator=(const NoSharedArenas&) = delete;
};

}  // namespace crossdock::cuda
