#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace crossdock::cuda {

/// Which devices can use a piece of memory, by the way it was allocated.
enum class MemoryKind : uint8_t {
  kPlain,    // cudaMalloc: devices with peer access
  kCommon,   // managed or page-locked host memory: all devices
  kGranted,  // cudaMallocAsync, cuMemMap: devices to which its owner gave access, nobody else
};

/// A device on which kernels of another rank run.
struct PeerDevice {
  int device = 0;
  bool has_access = false;  // to this piece of memory; of kGranted only
};

/// Whether memory of this kind on `device` must be copied for the peers, to memory that they reach.
constexpr bool needs_copy(int device, MemoryKind kind, std::span<const PeerDevice> peers) {
  return kind == MemoryKind::kGranted && std::ranges::any_of(peers, [&](const PeerDevice& peer) {
           return peer.device != device && !peer.has_access;
         });
}

}  // namespace crossdock::cuda
