#include "comm/cuda/peer_memory.hpp"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "comm/cuda/memory_access.hpp"
#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

constexpr int kPretendedDevice = -1;
std::atomic<int> num_pretending = 0;

std::vector<int> all_devices() {
  int count = 0;
  CROSSDOCK_CUDA(cudaGetDeviceCount(&count));
  std::vector<int> devices(static_cast<size_t>(count));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

[[noreturn]] void throw_unreachable(int peer, cudaError_t status) {
  const std::string call = concat("cudaIpcOpenMemHandle for memory of rank ", peer,
                                  " (every rank must be a process of its own, and the ranks of a "
                                  "node must be able to share GPU memory)");
  throw_error(status, call.c_str());
}

}  // namespace

PeersOnOtherGpus::PeersOnOtherGpus() {
  ++num_pretending;
}

PeersOnOtherGpus::~PeersOnOtherGpus() {
  --num_pretending;
}

PeerMemory::PeerMemory(const Communicator& communicator, int device)
    : needs_export_(!communicator.shares_address_space() && communicator.size() > 1),
      shares_address_space_(communicator.shares_address_space()),
      topology_(communicator.topology()),
      rank_(communicator.rank()),
      device_(device),
      is_pretended_(num_pretending > 0) {
  if (is_pretended_) {
    peer_devices_ = {kPretendedDevice};
  } else if (shares_address_space_ && communicator.size() > 1) {
    peer_devices_ = all_devices();
  }
}

bool PeerMemory::is_near(int peer) const {
  const std::vector<int>& nodes = topology_.node_of_rank;
  return nodes[static_cast<size_t>(peer)] == nodes[static_cast<size_t>(rank_)];
}

PeerMemory::~PeerMemory() {
  if (mappings_.empty()) return;
  const DeviceGuard guard(device_, std::nothrow);
  const RelaxedCapture relaxed;
  for (const auto& [key, base] : mappings_) cudaIpcCloseMemHandle(base);
}

void PeerMemory::set_peer_devices(std::vector<int> devices) {
  if (!is_pretended_) peer_devices_ = std::move(devices);
}

bool PeerMemory::needs_copy(const void* data) const {
  if (needs_export_) return true;
  const bool has_others =
      std::ranges::any_of(peer_devices_, [&](int peer) { return peer != device_; });
  if (!has_others) return false;  // without asking the driver
  const MemoryKind kind = kind_of(data);
  const auto is_granted_to = [&](int peer) {
    return kind == MemoryKind::kGranted && peer != kPretendedDevice && has_access(peer, data);
  };
  std::vector<PeerDevice> peers;
  for (const int peer : peer_devices_) {
    peers.push_back({.device = peer, .has_access = is_granted_to(peer)});
  }
  return cuda::needs_copy(device_, kind, peers);
}

MemoryHandle PeerMemory::show(const void* data, const MemoryBlock& block) const {
  MemoryHandle handle{};
  handle.device = -1;
  if (data == nullptr) return handle;
  handle.device = device_;
  handle.base = block.base;
  handle.offset = static_cast<const std::byte*>(data) - block.base;
  if (needs_export_) {
    handle.is_shared = 1;
    CROSSDOCK_CUDA(cudaIpcGetMemHandle(&handle.exported, block.base));
  }
  return handle;
}

std::byte* PeerMemory::reach(int peer, const MemoryHandle& handle) {
  if (handle.device < 0) return nullptr;
  if (peer == rank_ || handle.is_shared == 0) {
    if (reached_devices_.insert(handle.device).second) enable_peer_access(device_, handle.device);
    return handle.base + handle.offset;
  }
  std::string bytes(reinterpret_cast<const char*>(&handle.exported), sizeof(handle.exported));
  const auto [found, is_new] = mappings_.try_emplace({peer, std::move(bytes)}, nullptr);
  if (is_new) {
    const CallGuard guard(device_);
    const cudaError_t status =
        cudaIpcOpenMemHandle(&found->second, handle.exported, cudaIpcMemLazyEnablePeerAccess);
    if (status != cudaSuccess) {
      mappings_.erase(found);
      throw_unreachable(peer, status);
    }
  }
  return static_cast<std::byte*>(found->second) + handle.offset;
}

}  // namespace crossdock::cuda
