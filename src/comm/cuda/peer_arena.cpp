#include "comm/cuda/peer_arena.hpp"

#include <map>
#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

std::optional<comm::DescriptorConnection> connect(const ArenaCard& card, MemorySharing sharing) {
  if (sharing != MemorySharing::kDescriptors) return std::nullopt;
  return comm::DescriptorConnection(card.address);
}

}  // namespace

std::shared_ptr<PeerArena> PeerArena::open(const ArenaCard& card, MemorySharing sharing,
                                           int device) {
  static auto* mutex = new std::mutex;
  static auto* all = new std::map<std::pair<comm::Secret, int>, std::shared_ptr<PeerArena>>;
  const std::lock_guard lock(*mutex);
  std::erase_if(*all, [](const auto& entry) {
    const PeerArena& arena = *entry.second;
    return arena.is_broken_ || (entry.second.use_count() == 1 && arena.has_lost_owner());
  });
  const auto found = all->find({card.id, device});
  if (found != all->end()) return found->second;
  auto arena = std::make_shared<PeerArena>(card, sharing, device);
  all->emplace(std::pair(card.id, device), arena);
  return arena;
}

PeerArena::PeerArena(const ArenaCard& card, MemorySharing sharing, int device)
    : device_(device), connection_(connect(card, sharing)), range_(device, card.capacity) {}

// Without a connection it is not known.
bool PeerArena::has_lost_owner() const {
  return !connection_ || connection_->is_closed();
}

int64_t PeerArena::num_bytes() const {
  const std::lock_guard lock(mutex_);
  return range_.num_bytes();
}

void PeerArena::extend(std::span<const ChunkNotice> notices, std::chrono::nanoseconds timeout) {
  const CallGuard guard(device_);
  const std::lock_guard lock(mutex_);
  for (const ChunkNotice& notice : notices) {
    const int64_t num_mapped = std::ssize(range_.chunks());
    if (notice.index < num_mapped) continue;
    CROSSDOCK_ASSERT(notice.index == num_mapped);
    try {
      range_.append(import_chunk(notice, timeout));
    } catch (...) {
      is_broken_ = true;  // its descriptor is passed only once
      throw;
    }
  }
}

PhysicalMemory PeerArena::import_chunk(const ChunkNotice& notice,
                                       std::chrono::nanoseconds timeout) {
  if (!connection_) return PhysicalMemory::import_fabric(notice.fabric, notice.num_bytes);
  const comm::DescriptorConnection::Received received = connection_->receive(timeout);
  CROSSDOCK_ASSERT(received.number == notice.index);
  return PhysicalMemory::import_descriptor(received.descriptor, notice.num_bytes);
}

}  // namespace crossdock::cuda
