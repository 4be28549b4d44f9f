#include "comm/cuda/peer_memory.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {

PeerMemory::PeerMemory(const Communicator& communicator, int device)
    : needs_export_(!communicator.shares_address_space() && communicator.size() > 1),
      shares_address_space_(communicator.shares_address_space()),
      topology_(communicator.topology()),
      rank_(communicator.rank()),
      device_(device) {}

bool PeerMemory::is_near(int peer) const {
  const std::vector<int>& nodes = topology_.node_of_rank;
  return nodes[static_cast<size_t>(peer)] == nodes[static_cast<size_t>(rank_)];
}

void PeerMemory::check_reach() const {
  if (shares_address_space_ || topology_.num_nodes <= 1) return;
  throw Error(ErrorCode::kUnsupported,
              "ranks on several nodes cannot reach each other's GPU memory; give an NCCL "
              "communicator (DeviceOptions::nccl_comm)");
}

PeerMemory::~PeerMemory() {
  if (mappings_.empty()) return;
  const DeviceGuard guard(device_, std::nothrow);
  const RelaxedCapture relaxed;
  for (const auto& [key, base] : mappings_) cudaIpcCloseMemHandle(base);
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
    if (status != cudaSuccess) mappings_.erase(found);
    CROSSDOCK_CUDA(status);
  }
  return static_cast<std::byte*>(found->second) + handle.offset;
}

}  // namespace crossdock::cuda
