#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// The memory of a buffer, in the form that communicators take.
inline SharedBytes shared_bytes(const Buffer& buffer) {
  return {.data = buffer.data(), .num_bytes = buffer.num_bytes(), .owner = buffer.owner()};
}

class Group;

namespace comm {

/// Locates memory of a window: plain data, sent to the peers in a rendezvous.
struct WindowHandle {
  uint64_t block = 0;            // number of the block at its owner, from 1; 0: no memory
  int64_t block_bytes = 0;       // size of the whole block
  int64_t offset = 0;            // of the memory within the block
  uint64_t owner_address = 0;    // of the block, for peers in the same address space
  int32_t owner_process = 0;     // for peers in other processes
  int32_t owner_descriptor = 0;  // of the memory file, in that process
};

/// Memory of this rank that the other ranks on its node load from and store into, and access to
/// theirs. Threads use plain memory. Processes use memory files (memfd), which disappear with the
/// last process that maps them, however it ends.
///
/// Blocks are leased: a Buffer from take() is valid until it is released, and its block is reused
/// afterwards. Growth adds a block, or enlarges a free one that is at least half as large as
/// needed, and never moves a live lease. Peers map a block when they first receive its handle, and
/// again when it has grown; handles must therefore be sent in a rendezvous, in which a rank that
/// could not grow refuses. A lease may be released only once no peer uses it, as after a dispatch
/// or combine. After a failure this is unknown, so take() throws: no block is reused or enlarged,
/// and a peer that still writes has its own mapping (processes) or finds the memory kept alive by
/// the communicator (threads).
class WindowPool {
 public:
  /// `check` is called before memory is taken and throws the error that poisoned the group, if any.
  explicit WindowPool(
      Communicator& communicator, std::function<void()> check = [] {});
  ~WindowPool();
  WindowPool(const WindowPool&) = delete;
  WindowPool& operator=(const WindowPool&) = delete;

  /// Leases num_bytes of this rank's memory, contents unspecified. Not collective.
  Buffer take(int64_t num_bytes);

  /// The handle of memory inside a leased block; nullopt for any other memory. Empty memory has the
  /// handle of no block.
  std::optional<WindowHandle> find(const void* data, int64_t num_bytes) const;

  /// The address in this process of the memory whose handle rank `peer` sent. Maps its block when
  /// first called. Null for the handle of no block.
  std::byte* reach(int peer, const WindowHandle& handle);

  /// Bytes of this rank's blocks, leased or free.
  int64_t bytes_held() const;

 private:
  struct Block;
  struct State;
  class Mapping;

  void allocate(Block& block, int64_t num_bytes);

  Communicator& communicator_;
  std::function<void()> check_;
  std::shared_ptr<State> state_;
  std::map<std::pair<int, uint64_t>, std::unique_ptr<Mapping>> peer_blocks_;
};

/// The windows of a group.
WindowPool& windows_of(Group& group);

}  // namespace comm
}  // namespace crossdock
