#pragma once

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/memory/descriptor_socket.hpp"
#include "core/cuda/device_arena.hpp"
#include "core/threading.hpp"

namespace crossdock::cuda {

/// What a process must know to map another process's arena: plain data.
struct ArenaCard {
  comm::Secret id{};
  comm::DescriptorAddress address{};  // with kDescriptors: where its chunks are passed
  int64_t capacity = 0;               // maximum size in bytes
};

/// Tells other processes about a chunk of an arena: plain data.
struct ChunkNotice {
  int64_t index = 0;
  int64_t num_bytes = 0;
  CUmemFabricHandle fabric{};  // with kFabric: what to open it with
};

/// An arena of this process as other processes see it. Thread-safe.
class SharedArena {
 public:
  /// The shared arena of a device. REQUIRES: sharing is kDescriptors or kFabric. Throws if the
  /// device or the system does not allow this kind of sharing.
  static SharedArena& of(int device, MemorySharing sharing);
  explicit SharedArena(std::shared_ptr<RangeArena> arena);
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  const RangeArena& arena() const { return *arena_; }
  const ArenaCard& card() const { return card_; }

  /// The chunks from `first` on. With kDescriptors they are also passed to all processes that have
  /// connected and do not have them yet. Does not wait.
  std::vector<ChunkNotice> announce(size_t first);

  /// The first chunks of the arena.
  struct Extent {
    size_t num_chunks = 0;
    int64_t num_bytes = 0;
  };
  /// Passes all current chunks to all processes that have connected, and waits until every process
  /// that is still connected has mapped them. These processes need not call anything: their service
  /// threads map the chunks (PeerArena). Returns what all of them have now. Throws Error(kTimeout)
  /// after `timeout`, Error(kCommunication) if a process cannot map a chunk.
  /// REQUIRES: kDescriptors.
  Extent publish(std::chrono::nanoseconds timeout);

 private:
  struct Peer {
    comm::DescriptorConnection connection;
    int64_t num_passed = 0;  // chunks
    int64_t num_mapped = 0;  // chunks
    std::string failure{};   // why it could not map the next one
  };
  // `sizes`: of the chunks that the peers must have.
  int64_t count_waiting(std::span<const int64_t> sizes);
  void serve_peers(std::span<const int64_t> sizes);
  void pass_to(Peer& peer, std::span<const int64_t> sizes) const;
  static void read_receipts(Peer& peer);

  std::shared_ptr<RangeArena> arena_;
  ArenaCard card_;
  std::mutex mutex_;
  std::optional<comm::DescriptorListener> listener_;  // with kDescriptors
  std::vector<Peer> peers_;
};

/// The arena of another process, mapped for kernels on one device. Its memory remains valid when
/// the other process ends. A mapping that nobody uses is kept for the next user, and removed only
/// after its owner has ended: unmapping memory that a late kernel uses would be fatal.
///
/// With kDescriptors, the service thread of this process (ServedConnection) maps a chunk as soon as
/// the owner has passed it. With kFabric, extend maps it. Thread-safe.
class PeerArena {
 public:
  /// The mapping that this process already has, or a new one, without memory at first. Throws if
  /// the other process cannot be reached. Does not wait. Also removes mappings that are no longer
  /// needed.
  static std::shared_ptr<PeerArena> open(const ArenaCard& card, MemorySharing sharing, int device);
  PeerArena(const ArenaCard& card, MemorySharing sharing, int device);
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;

  std::byte* base() const { return range_.base(); }
  int64_t num_bytes() const;  // mapped

  /// Returns when these chunks are mapped. With kDescriptors, waits for them, at most for
  /// `timeout`; never waits for the device. Throws if they are late or cannot be mapped.
  /// REQUIRES: the first notice follows the chunks that are mapped, or is one of them.
  void extend(std::span<const ChunkNotice> notices, std::chrono::nanoseconds timeout);

  /// Calls `callback` when the owner has ended, as OneShotEvent::watch does, while this arena
  /// exists. With kFabric that is never known.
  [[nodiscard]] std::shared_ptr<const void> watch_owner(std::function<void()> callback);

 private:
  bool has_lost_owner() const;
  void map_fabric(std::span<const ChunkNotice> notices);
  void await_chunks(int64_t num_chunks, std::chrono::nanoseconds timeout);
  // On the service thread:
  void map_passed(const comm::DescriptorConnection::Received& received);
  void note_lost_owner();

  int device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  MappedRange range_;
  std::optional<Error> failure_;         // why the next chunk could not be mapped
  bool is_complete_ = false;             // the owner has ended: no chunk follows
  std::atomic<bool> is_broken_ = false;  // a chunk is missing; others open the arena anew
  OneShotEvent owner_ended_;
  std::optional<comm::ServedConnection> connection_;  // with kDescriptors; ends before the others
};

}  // namespace crossdock::cuda
