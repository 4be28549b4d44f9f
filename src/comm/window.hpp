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

namespace crossdock::comm {

/// Where memory of a window lies: plain data that travels to the peers in a rendezvous.
struct WindowHandle {
  uint64_t block = 0;            // number of the block at its owner, from 1; 0: no memory
  int64_t block_bytes = 0;       // size of the whole block
  int64_t offset = 0;            // of the memory within the block
  uint64_t owner_address = 0;    // of the block, for peers in the same address space
  int32_t owner_process = 0;     // for peers in other processes
  int32_t owner_descriptor = 0;  // of the memory file, in that process
};

/// Memory of this rank that the other ranks of its node load from and store to, and the way to
/// theirs. Threads use plain memory, processes memory files (memfd), which vanish with the last
/// process that maps them, however it ends.
///
/// Blocks are leased: a Buffer from take() is valid until released and its block is handed out
/// again afterwards. Growth adds a block, or enlarges a free one that is up to half too small, and
/// never moves a live lease; peers map a block when its handle first reaches them, and again when
/// it has grown, so handles must travel in a rendezvous, in which a rank that could not grow
/// refuses. Who releases a lease must know that no peer uses it any more (the end of
/// a dispatch or combine says so). After a fault nobody knows that: take() then throws, so that no
/// block is handed out again or enlarged, and a peer that still writes holds its own mapping
/// (processes) or finds the memory kept by the communicator (threads).
class WindowPool {
 public:
  /// `check` throws the error that broke the group, if any; before any memory is taken.
  explicit WindowPool(
      Communicator& communicator, std::function<void()> check = [] {});
  ~WindowPool();
  WindowPool(const WindowPool&) = delete;
  WindowPool& operator=(const WindowPool&) = delete;

  /// Leases num_bytes of this rank's memory, contents unspecified. Not collective.
  Buffer take(int64_t num_bytes);

  /// The handle of memory inside a leased block; nothing if it is foreign. Empty memory has the
  /// handle of no block.
  std::optional<WindowHandle> find(const void* data, int64_t num_bytes) const;

  /// The address, in this process, of memory that rank `peer` has the handle of. Maps its block on
  /// first sight. Null for the handle of no block.
  std::byte* reach(int peer, const WindowHandle& handle);

  /// Bytes of this rank's blocks, leased or waiting.
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

}  // namespace crossdock::comm
