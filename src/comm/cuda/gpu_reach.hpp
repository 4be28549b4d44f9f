#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace crossdock::cuda {

/// The PCI address of a GPU as text: processes may number GPUs differently.
using GpuId = std::array<char, 16>;

/// A rank's GPU and the GPUs whose memory it cannot use.
struct GpuReach {
  GpuId gpu{};
  bool reaches_nobody = false;  // see comm::GpuPretences
  /// Among the GPUs that the rank's process sees. Others are assumed reachable: CUDA IPC does not
  /// need to see a GPU.
  std::vector<GpuId> unreachable{};

  std::vector<std::byte> to_bytes() const;
  static GpuReach from_bytes(std::span<const std::byte> bytes);
};

/// What a GPU of this process can reach.
GpuReach reach_of(int device);

/// Whether on every node each rank's GPU can use the memory of the other ranks' GPUs. Both
/// arguments have an entry per rank.
inline bool reach_each_other(std::span<const GpuReach> ranks, std::span<const int> node_of_rank) {
  const auto can_reach = [](const GpuReach& from, const GpuReach& to) {
    return !from.reaches_nobody &&
           std::ranges::find(from.unreachable, to.gpu) == from.unreachable.end();
  };
  for (size_t a = 0; a < ranks.size(); ++a) {
    for (size_t b = 0; b < ranks.size(); ++b) {
      const bool is_near = a != b && node_of_rank[a] == node_of_rank[b];
      if (is_near && !can_reach(ranks[a], ranks[b])) return false;
    }
  }
  return true;
}

/// Whether two ranks of a node use the same GPU. Both arguments have an entry per rank.
inline bool share_gpus(std::span<const GpuReach> ranks, std::span<const int> node_of_rank) {
  for (size_t a = 0; a < ranks.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      if (node_of_rank[a] == node_of_rank[b] && ranks[a].gpu == ranks[b].gpu) return true;
    }
  }
  return false;
}

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

/// How the memory at `data` was allocated; kGranted if the driver does not know.
MemoryKind kind_of(const void* data);

/// Whether the owner of memory of kind kGranted gave `device` read and write access.
bool has_access(int device, const void* data);

}  // namespace crossdock::cuda
