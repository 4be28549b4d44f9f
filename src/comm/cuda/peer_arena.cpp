#include "comm/cuda/peer_arena.hpp"

#include <map>
#include <string>
#include <utility>

#include "comm/agreed_failure.hpp"
#include "comm/deadlines.hpp"
#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
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
    : device_(device), range_(device, card.capacity) {
  if (sharing != MemorySharing::kDescriptors) return;
  connection_.emplace(comm::DescriptorConnection(card.address),
                      comm::ServedConnection::Handlers{
                          .take = [this](const auto& received) { map_passed(received); },
                          .closed = [this] { note_lost_owner(); }});
}

// Unknown without a connection; the owner then counts as lost.
bool PeerArena::has_lost_owner() const {
  return !connection_ || connection_->is_closed();
}

int64_t PeerArena::num_bytes() const {
  const std::lock_guard lock(mutex_);
  return range_.num_bytes();
}

void PeerArena::extend(std::span<const ChunkNotice> notices, std::chrono::nanoseconds timeout) {
  if (notices.empty()) return;
  if (!connection_) return map_fabric(notices);
  await_chunks(notices.back().index + 1, timeout);
}

void PeerArena::map_fabric(std::span<const ChunkNotice> notices) {
  const CallGuard guard(device_);
  const std::lock_guard lock(mutex_);
  for (const ChunkNotice& notice : notices) {
    const int64_t num_mapped = std::ssize(range_.chunks());
    if (notice.index < num_mapped) continue;
    CROSSDOCK_ASSERT(notice.index == num_mapped);
    try {
      range_.append(PhysicalMemory::import_fabric(notice.fabric, notice.num_bytes));
    } catch (...) {
      is_broken_ = true;
      throw;
    }
  }
}

void PeerArena::await_chunks(int64_t num_chunks, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto are_mapped = [&] { return std::ssize(range_.chunks()) >= num_chunks; };
  const auto is_over = [&] { return are_mapped() || failure_ || is_complete_; };
  const bool is_in_time =
      changed_.wait_until(lock, comm::deadline_after(comm::Clock::now(), timeout), is_over);
  if (are_mapped()) return;
  is_broken_ = true;
  if (failure_) throw Error(*failure_);
  throw Error(ErrorCode::kCommunication,
              is_in_time ? std::string("a process on this node has ended before it passed its GPU "
                                       "memory to this one")
                         : concat("a process on this node has not passed its GPU memory in time "
                                  "(waited ",
                                  comm::to_seconds_text(timeout), ")"));
}

void PeerArena::map_passed(const comm::DescriptorConnection::Received& received) {
  const std::lock_guard lock(mutex_);
  try {
    if (failure_) throw Error(*failure_);
    const CallGuard guard(device_);
    CROSSDOCK_CUDA(cudaSetDevice(device_));  // a new thread has no context, even for device 0
    const auto [index, num_bytes] = received.label;
    CROSSDOCK_ASSERT(index == std::ssize(range_.chunks()));
    range_.append(PhysicalMemory::import_descriptor(received.descriptor(), num_bytes));
  } catch (...) {
    failure_ = current_error();
    is_broken_ = true;
  }
  changed_.notify_all();
  if (failure_) throw Error(*failure_);
}

void PeerArena::note_lost_owner() {
  {
    const std::lock_guard lock(mutex_);
    is_complete_ = true;
  }
  changed_.notify_all();
  owner_ended_.fire();
}

std::shared_ptr<const void> PeerArena::watch_owner(std::function<void()> callback) {
  return owner_ended_.watch(std::move(callback));
}

}  // namespace crossdock::cuda
