#pragma once

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

#include "comm/cuda/shared_arena.hpp"
#include "comm/served_connection.hpp"
#include "core/cuda/physical_memory.hpp"
#include "core/one_shot_event.hpp"

namespace crossdock::cuda {

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
