#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/device_pool.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::cuda {

/// Locates device memory: plain data, sent to the peers in a rendezvous.
struct MemoryHandle {
  int32_t device = -1;          // of the owner; -1: no memory
  int32_t is_shared = 0;        // the rest is valid in other processes
  std::byte* base = nullptr;    // of the allocation, in the owner's address space
  int64_t offset = 0;           // of the memory within it
  cudaIpcMemHandle_t exported;  // of the allocation
};

/// Access to the device memory of the other ranks: their own pointers if they are threads of this
/// process, CUDA IPC mappings if they are processes on this node.
class PeerMemory {
 public:
  /// For kernels that run on `device`.
  PeerMemory(const Communicator& communicator, int device);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Whether rank `peer` is on this rank's node.
  bool is_near(int peer) const;

  /// Whether peers can only reach memory that Crossdock allocated.
  bool needs_export() const { return needs_export_; }

  /// Sets the devices that run kernels which use this rank's memory. Until they are known, all
  /// devices of this process are assumed.
  void set_peer_devices(std::vector<int> devices);

  /// Whether peers need a copy of memory that Crossdock did not allocate, because their devices
  /// cannot reach it.
  bool needs_copy(const void* data) const;

  /// A handle for memory at `data`, part of the allocation `block`. Null data has the handle of no
  /// memory.
  MemoryHandle show(const void* data, const MemoryBlock& block) const;

  /// The address, for kernels of this rank, of memory that rank `peer` sent the handle of. Maps its
  /// allocation when first called; the mapping lasts as long as this object.
  std::byte* reach(int peer, const MemoryHandle& handle);

  /// The mappings outlast this object: kernels may be using them.
  void skip_unmapping() { mappings_.clear(); }

 private:
  bool needs_export_;
  bool shares_address_space_;
  Topology topology_;
  int rank_;
  int device_;
  bool is_pretended_;              // see PeersOnOtherGpus
  std::vector<int> peer_devices_;  // may name a device more than once
  std::set<int> reached_devices_;  // whose memory kernels on device_ may use
  // (rank, bytes of the exported handle) -> base here. Owners do not free what they have exported
  // (see DeviceArena), so a handle always means the same memory.
  std::map<std::pair<int, std::string>, void*> mappings_;
};

/// For tests on a machine with one GPU: a PeerMemory made while one of these exists takes its peers
/// for kernels on another GPU that has no access to anything.
class PeersOnOtherGpus {
 public:
  PeersOnOtherGpus();
  ~PeersOnOtherGpus();
  PeersOnOtherGpus(const PeersOnOtherGpus&) = delete;
  PeersOnOtherGpus& operator=(const PeersOnOtherGpus&) = delete;
};

}  // namespace crossdock::cuda
