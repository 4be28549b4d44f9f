#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda/shared_arena.hpp"
#include "core/cuda/device_arena.hpp"
#include "core/cuda/device_pool.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cuda {

/// How the processes of a group share memory, seen from one of them.
struct SharingChoice {
  MemorySharing sharing = MemorySharing::kIpc;
  SharedArena* own = nullptr;                             // this rank's; null with kIpc
  size_t num_chunks = 0;                                  // of own that all near ranks have mapped
  int64_t common_bytes = 0;                               // their bytes
  std::vector<std::shared_ptr<PeerArena>> peer_arenas{};  // [P]; null: far, this rank, or kIpc
};

struct SharingArgs {
  int device = 0;
  bool reaches_peers = true;       // false: kernels use no memory of other ranks; nothing is mapped
  bool prefers_ipc = false;        // unless CROSSDOCK_PEER_MEMORY says otherwise
  std::string config{};            // must be identical on every rank
  const Error* refusal = nullptr;  // why this rank refuses, if it does
};

/// Chooses the first kind of sharing that works between all ranks of every node, or the one that
/// CROSSDOCK_PEER_MEMORY names, and maps the arenas of the ranks on this node. kIpc is the last
/// resort and is not tried here. Every kind that is tried is recorded as an event. Part of the
/// operation "plan", before there is a plan. Collective. Throws the same error on all ranks if one
/// refuses or if nothing works; the group stays usable.
SharingChoice choose_sharing(Group& group, const SharingArgs& args);

/// Locates device memory: plain data, sent to the peers in a rendezvous.
struct MemoryHandle {
  int32_t device = -1;          // of the owner; -1: no memory
  int32_t is_shared = 0;        // the ranks are processes
  int64_t offset = 0;           // from PeerMemory::base_of; with kIpc, within the allocation
  std::byte* base = nullptr;    // with kIpc: of the allocation, in the owner's address space
  cudaIpcMemHandle_t exported;  // with kIpc: of the allocation
};

/// Access to the device memory of the other ranks.
///
/// Memory is located by an offset, which means the same to all ranks: a peer finds it at base_of +
/// offset. If the ranks are threads of this process, all bases are null and an offset is an
/// address. If they are processes, every rank has one arena (RangeArena) of contiguous addresses,
/// and its peers map all of it, each at a base of its own. An arena grows at its end. Its owner
/// tells the peers in a rendezvous (news), and they map the growth (hear); or, with kDescriptors,
/// it publishes the growth, which the peers' service threads map. From then on an offset below
/// common_bytes needs no rendezvous.
///
/// Where processes cannot share virtual memory they use cudaIpc, which has no offsets
/// (has_offsets): peers map every allocation separately, when they first receive its handle.
class PeerMemory {
 public:
  /// For kernels that run on `device`. peers_are_elsewhere: see comm::GpuPretences.
  PeerMemory(const Communicator& communicator, int device, bool peers_are_elsewhere = false);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Whether rank `peer` is on this rank's node.
  bool is_near(int peer) const;

  /// Whether peers can only reach memory that Crossdock allocated.
  bool needs_export() const { return needs_export_; }

  /// If the ranks are processes: agrees on how they share memory and maps the arenas of the ranks
  /// on this node (see choose_sharing, with this object's device). Collective. Afterwards memory
  /// for the peers must come from an arena with sharing().
  void share_memory(Group& group, SharingArgs args);
  MemorySharing sharing() const { return choice_.sharing; }

  /// Sets the devices that run kernels which use this rank's memory. Until they are known, all
  /// devices of this process are assumed.
  void set_peer_devices(std::vector<int> devices);

  /// Whether peers need a copy of memory that Crossdock did not allocate, because their devices
  /// cannot reach it.
  bool needs_copy(const void* data) const;

  /// A handle for memory at `data`, part of the allocation `block`. Null data has the handle of no
  /// memory.
  MemoryHandle show(const void* data, const MemoryBlock& block) const;

  /// The address, for kernels of this rank, of the memory whose handle rank `peer` sent. With kIpc,
  /// maps its allocation when first called; the mapping lasts as long as this object.
  std::byte* reach(int peer, const MemoryHandle& handle);

  // Memory by offsets. REQUIRES: share_memory, if the ranks are processes; has_offsets() for all
  // but the news.

  bool has_offsets() const { return sharing() != MemorySharing::kIpc; }
  /// The offset of this rank's memory. REQUIRES: from an arena with sharing(), if the ranks are
  /// processes.
  int64_t offset_of(const void* data) const;
  /// What kernels of this rank add to an offset of rank `peer`. REQUIRES: the peer is near.
  std::byte* base_of(int peer) const;
  /// All near peers have mapped this rank's memory below this offset, or will have before they
  /// queue a kernel that uses it. Only grows.
  int64_t common_bytes() const { return common_bytes_; }
  /// Memory of rank `peer` up to this offset is mapped here.
  int64_t mapped_bytes(int peer) const;

  /// The growth of this rank's arena that the group has not heard of; to be sent in every
  /// rendezvous. Empty in the steady state.
  std::vector<ChunkNotice> news();
  /// Called once all ranks have received the news.
  void note_heard(std::span<const ChunkNotice> news);
  /// Maps the growth of the arena of rank `peer`; does nothing for a far rank or this one. Throws
  /// if that is impossible. Does not wait for the device.
  void hear(int peer, std::span<const ChunkNotice> news);

  /// Whether publish works: peers map growth without a rendezvous.
  bool grows_alone() const { return !needs_export_ || sharing() == MemorySharing::kDescriptors; }
  /// Returns when all near peers have mapped this rank's arena as it is now; common_bytes is then
  /// its size. Their hosts and GPUs may be blocked. Costs nothing if the arena has not grown.
  /// Throws Error(kTimeout) after the progress deadline, Error(kCommunication) if a peer cannot map
  /// the growth. A peer whose process has ended does not count. REQUIRES: grows_alone().
  void publish();

  /// With kDescriptors, calls `callback` with each near peer whose process has ended: immediately
  /// if it already has, else on the service thread as soon as it ends. Reports each peer at most
  /// once. Destroying the result waits for a callback that is running; afterwards none runs. The
  /// callback must be short, must not throw, and must not use this object or the result.
  [[nodiscard]] std::shared_ptr<const void> watch_owners(
      const std::function<void(int peer)>& callback) const;

  /// The mappings outlast this object: kernels may be using them.
  void skip_unmapping();

 private:
  PeerArena* arena_of(int peer) const;
  std::byte* reach_allocation(int peer, const MemoryHandle& handle);

  bool needs_export_;
  Topology topology_;
  int rank_;
  int device_;
  bool peers_are_elsewhere_;       // see comm::GpuPretences
  std::vector<int> peer_devices_;  // may name a device more than once
  std::set<int> reached_devices_;  // whose memory kernels on device_ may use
  SharingChoice choice_;
  int64_t common_bytes_;
  std::chrono::nanoseconds timeout_{};  // for growth to arrive
  // With kIpc: (rank, bytes of the exported handle) -> base here. Owners do not free what they have
  // exported (see DeviceArena), so a handle always means the same memory.
  std::map<std::pair<int, std::string>, void*> mappings_;
};

}  // namespace crossdock::cuda
