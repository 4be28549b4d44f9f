#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace crossdock::cuda {

/// Which devices can use memory, by how it was allocated.
enum class MemoryKind : uint8_t {
  kPlain,    // cudaMalloc: devices with peer access
  kCommon,   // managed or page-locked host memory: all devices
  kGranted,  // cudaMallocAsync, cuMemMap: only devices that its owner gave access
};

/// A device that runs kernels of another rank.
struct PeerDevice {
  int device = 0;
  bool has_access = false;  // to this memory; for kGranted only
};

/// Whether memory of this kind on `device` must be copied to memory that the peers can reach.
constexpr bool needs_copy(int device, MemoryKind kind, std::span<const PeerDevice> peers) {
  return kind == MemoryKind::kGranted && std::ranges::any_of(peers, [&](const PeerDevice& peer) {
           return peer.device != device && !peer.has_access;
         });
}

}  // namespace crossdock::cuda
