#include "comm/cuda/shared_arena.hpp"

#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "comm/failure.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/descriptor.hpp"

namespace crossdock::cuda {

SharedArena& SharedArena::of(int device, MemorySharing sharing) {
  // Never destroyed, as arenas are not.
  static auto* mutex = new std::mutex;
  static auto* all = new std::map<std::pair<int, MemorySharing>, std::unique_ptr<SharedArena>>;
  const std::lock_guard lock(*mutex);
  std::unique_ptr<SharedArena>& shared = (*all)[{device, sharing}];
  if (!shared) {
    const CallGuard guard(device);
    check_sharing(device, sharing);
    shared = std::make_unique<SharedArena>(RangeArena::make(device, sharing));
  }
  return *shared;
}

SharedArena::SharedArena(std::shared_ptr<RangeArena> arena) : arena_(std::move(arena)) {
  if (arena_->sharing() == MemorySharing::kDescriptors) listener_.emplace();
  card_ = {.id = comm::make_secret(),
           .address = listener_ ? listener_->address() : comm::DescriptorAddress{},
           .capacity = arena_->capacity()};
}

std::vector<ChunkNotice> SharedArena::announce(size_t first) {
  const CallGuard guard(arena_->device());
  const std::lock_guard lock(mutex_);
  const std::vector<int64_t> sizes = arena_->chunks();
  if (listener_) serve_peers(sizes);
  std::vector<ChunkNotice> notices;
  for (size_t i = first; i < sizes.size(); ++i) {
    ChunkNotice notice{.index = static_cast<int64_t>(i), .num_bytes = sizes[i]};
    if (!listener_) notice.fabric = arena_->export_fabric(i);
    notices.push_back(notice);
  }
  return notices;
}

SharedArena::Extent SharedArena::publish(std::chrono::nanoseconds timeout) {
  CROSSDOCK_ASSERT(listener_.has_value());
  constexpr std::chrono::microseconds kPause{100};  // mapping takes longer
  const CallGuard guard(arena_->device());
  const std::vector<int64_t> sizes = arena_->chunks();
  const auto deadline = comm::deadline_after(comm::Clock::now(), timeout);
  while (const int64_t num_waiting = count_waiting(sizes)) {
    if (comm::Clock::now() > deadline) {
      throw Error(ErrorCode::kTimeout,
                  concat("waited ", comm::to_seconds_text(timeout),
                         " for processes on this node to map new memory of GPU ", arena_->device(),
                         "; not confirmed by ", num_waiting, " of them. Are they stopped?"));
    }
    std::this_thread::sleep_for(kPause);
  }
  return {.num_chunks = sizes.size(),
          .num_bytes = std::accumulate(sizes.begin(), sizes.end(), int64_t{0})};
}

// The number of peers that have not mapped these chunks yet. Throws if one of them never will.
int64_t SharedArena::count_waiting(std::span<const int64_t> sizes) {
  const std::lock_guard lock(mutex_);
  serve_peers(sizes);
  int64_t num_waiting = 0;
  for (const Peer& peer : peers_) {
    if (peer.num_mapped >= std::ssize(sizes)) continue;
    if (!peer.failure.empty()) {
      throw Error(ErrorCode::kCommunication,
                  concat("a process on this node cannot map new memory of GPU ", arena_->device(),
                         ": ", peer.failure));
    }
    ++num_waiting;
  }
  return num_waiting;
}

// REQUIRES: the mutex is locked.
void SharedArena::serve_peers(std::span<const int64_t> sizes) {
  for (comm::DescriptorConnection& connection : listener_->accept()) {
    peers_.push_back({.connection = std::move(connection)});
  }
  std::erase_if(peers_, [](const Peer& peer) { return peer.connection.is_closed(); });
  for (Peer& peer : peers_) {
    read_receipts(peer);
    pass_to(peer, sizes);
  }
}

// What cannot be passed now is passed by a later call.
void SharedArena::pass_to(Peer& peer, std::span<const int64_t> sizes) const {
  using Sending = comm::DescriptorConnection::Sending;
  while (peer.num_passed < std::ssize(sizes)) {
    const auto chunk = static_cast<size_t>(peer.num_passed);
    const Descriptor exported = arena_->export_descriptor(chunk);
    const comm::DescriptorLabel label{.index = peer.num_passed, .num_bytes = sizes[chunk]};
    if (peer.connection.send(exported, label) != Sending::kDone) return;
    ++peer.num_passed;
  }
}

// Chunks are mapped in order; after one that cannot be mapped, none is.
void SharedArena::read_receipts(Peer& peer) {
  while (const auto receipt = peer.connection.receive_receipt()) {
    if (!receipt->reason().empty()) {
      if (peer.failure.empty()) peer.failure = receipt->reason();
    } else {
      peer.num_mapped = receipt->index + 1;
    }
  }
}

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
    // Not a DeviceGuard: this is the service thread, whose device before is 0 although nothing uses
    // it there. Restoring it would give every process a context on GPU 0. A new thread has no
    // context, so the device is set even if it is 0.
    const RelaxedCapture relaxed;
    const StandardDescriptorGuard descriptors;  // the driver opens devices
    CROSSDOCK_CUDA(cudaSetDevice(device_));
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
