#include "comm/cuda/peer_memory.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <utility>

#include "comm/cuda/gpu_reach.hpp"
#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/process_state.hpp"

namespace crossdock::cuda {
namespace {

constexpr int kPretendedDevice = -1;
std::atomic<int> num_pretending = 0;
constexpr int64_t kAllBytes = std::numeric_limits<int64_t>::max();  // of one address space

std::vector<int> all_devices() {
  int count = 0;
  CROSSDOCK_CUDA(cudaGetDeviceCount(&count));
  std::vector<int> devices(static_cast<size_t>(count));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

// The base may be null: offsets are addresses then.
std::byte* at_offset(std::byte* base, int64_t offset) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<intptr_t>(base) + offset);  // NOLINT
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

bool PeersOnOtherGpus::are_pretended() {
  return num_pretending > 0;
}

PeerMemory::PeerMemory(const Communicator& communicator, int device)
    : needs_export_(!communicator.shares_address_space() && communicator.size() > 1),
      topology_(communicator.topology()),
      rank_(communicator.rank()),
      device_(device),
      is_pretended_(num_pretending > 0),
      choice_{.sharing = MemorySharing::kNone},
      common_bytes_(needs_export_ ? 0 : kAllBytes) {
  if (is_pretended_) {
    peer_devices_ = {kPretendedDevice};
  } else if (communicator.shares_address_space() && communicator.size() > 1) {
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

void PeerMemory::meet(Group& group, SharingArgs args) {
  if (!needs_export_) return;
  args.device = device_;
  choice_ = choose_sharing(group, args);
  timeout_ = *group.options().progress_deadline;
  common_bytes_ = choice_.common_bytes;
}

MemoryHandle PeerMemory::show(const void* data, const MemoryBlock& block) const {
  MemoryHandle handle{};
  handle.device = -1;
  if (data == nullptr) return handle;
  handle.device = device_;
  handle.is_shared = needs_export_ ? 1 : 0;
  if (has_offsets()) {
    handle.offset = offset_of(data);
    return handle;
  }
  handle.base = block.base;
  handle.offset = static_cast<const std::byte*>(data) - block.base;
  CROSSDOCK_CUDA(cudaIpcGetMemHandle(&handle.exported, block.base));
  return handle;
}

std::byte* PeerMemory::reach(int peer, const MemoryHandle& handle) {
  if (handle.device < 0) return nullptr;
  if (!has_offsets()) return reach_allocation(peer, handle);
  if (handle.is_shared == 0 && reached_devices_.insert(handle.device).second) {
    enable_peer_access(device_, handle.device);
  }
  return at_offset(base_of(peer), handle.offset);
}

std::byte* PeerMemory::reach_allocation(int peer, const MemoryHandle& handle) {
  if (peer == rank_) return handle.base + handle.offset;
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

PeerArena* PeerMemory::arena_of(int peer) const {
  return choice_.own == nullptr ? nullptr : choice_.peer_arenas[static_cast<size_t>(peer)].get();
}

int64_t PeerMemory::offset_of(const void* data) const {
  return reinterpret_cast<intptr_t>(data) - reinterpret_cast<intptr_t>(base_of(rank_));
}

std::byte* PeerMemory::base_of(int peer) const {
  if (choice_.own == nullptr) return nullptr;
  return peer == rank_ ? choice_.own->arena().base() : arena_of(peer)->base();
}

int64_t PeerMemory::mapped_bytes(int peer) const {
  if (choice_.own == nullptr) return kAllBytes;
  return peer == rank_ ? choice_.own->arena().num_bytes() : arena_of(peer)->num_bytes();
}

std::vector<ChunkNotice> PeerMemory::news() {
  if (choice_.own == nullptr || choice_.own->arena().num_bytes() == common_bytes_) return {};
  return choice_.own->announce(choice_.num_chunks);
}

void PeerMemory::note_heard(std::span<const ChunkNotice> news) {
  for (const ChunkNotice& notice : news) {
    if (static_cast<size_t>(notice.index) < choice_.num_chunks)
      continue;  // published in the
                 // meantime
    ++choice_.num_chunks;
    common_bytes_ += notice.num_bytes;
  }
}

void PeerMemory::hear(int peer, std::span<const ChunkNotice> news) {
  if (PeerArena* arena = arena_of(peer)) arena->extend(news, timeout_);
}

void PeerMemory::publish() {
  CROSSDOCK_ASSERT(grows_alone());
  if (choice_.own == nullptr || choice_.own->arena().num_bytes() == common_bytes_) return;
  const SharedArena::Extent published = choice_.own->publish(timeout_);
  choice_.num_chunks = published.num_chunks;
  common_bytes_ = published.num_bytes;
}

std::shared_ptr<const void> PeerMemory::watch_owners(
    const std::function<void(int peer)>& callback) const {
  auto watches = std::make_shared<std::vector<std::shared_ptr<const void>>>();
  for (int peer = 0; peer < std::ssize(choice_.peer_arenas); ++peer) {
    PeerArena* arena = arena_of(peer);
    if (arena == nullptr) continue;
    watches->push_back(arena->watch_owner([callback, peer] { callback(peer); }));
  }
  return watches;
}

void PeerMemory::skip_unmapping() {
  mappings_.clear();
  for (const std::shared_ptr<PeerArena>& arena : choice_.peer_arenas) leak(arena);
}

}  // namespace crossdock::cuda
