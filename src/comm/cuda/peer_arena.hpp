#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "comm/cuda/shared_arena.hpp"
#include "comm/descriptor_socket.hpp"
#include "core/cuda/mapped_range.hpp"

namespace crossdock::cuda {

/// The arena of another process, mapped for kernels on one device. Its memory remains valid when
/// the other process ends. A mapping that nobody uses is kept for the next user, and removed only
/// after its owner has ended: unmapping memory that a late kernel uses would be fatal.
/// Thread-safe.
class PeerArena {
 public:
  /// The mapping that this process already has, or a new one, without memory at first. Throws if
  /// the other process cannot be reached. Does not wait. Also removes what is no longer needed.
  static std::shared_ptr<PeerArena> open(const ArenaCard& card, MemorySharing sharing, int device);
  PeerArena(const ArenaCard& card, MemorySharing sharing, int device);
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;

  std::byte* base() const { return range_.base(); }
  int64_t num_bytes() const;  // mapped

  /// Maps the chunks that are not mapped yet. Waits for their descriptors, at most for `timeout`,
  /// but not for the device. REQUIRES: the first notice follows the chunks that are mapped, or is
  /// one of them.
  void extend(std::span<const ChunkNotice> notices, std::chrono::nanoseconds timeout);

 private:
  bool has_lost_owner() const;
  PhysicalMemory import_chunk(const ChunkNotice& notice, std::chrono::nanoseconds timeout);

  int device_;
  std::optional<comm::DescriptorConnection> connection_;  // with kDescriptors
  mutable std::mutex mutex_;
  MappedRange range_;
  std::atomic<bool> is_broken_ = false;  // a chunk is missing; others open the arena anew
};

}  // namespace crossdock::cuda
