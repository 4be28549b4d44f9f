#include "comm/cuda/shared_arena.hpp"

#include <atomic>
#include <map>
#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

std::atomic<int> num_forbidding = 0;  // NoSharedArenas

}  // namespace

SharedArena& SharedArena::of(int device, MemorySharing sharing) {
  if (num_forbidding > 0) {
    throw Error(ErrorCode::kUnsupported, "this process does not share virtual memory");
  }
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
  if (listener_) {
    for (comm::DescriptorConnection& connection : listener_->accept()) {
      peers_.push_back({.connection = std::move(connection)});
    }
    std::erase_if(peers_, [](const Peer& peer) { return peer.connection.is_closed(); });
    for (Peer& peer : peers_) pass_to(peer, sizes.size());
  }
  std::vector<ChunkNotice> notices;
  for (size_t i = first; i < sizes.size(); ++i) {
    ChunkNotice notice{.index = static_cast<int64_t>(i), .num_bytes = sizes[i]};
    if (!listener_) notice.fabric = arena_->export_fabric(i);
    notices.push_back(notice);
  }
  return notices;
}

// What cannot be passed now is passed with the next announcement; the peer reports if it is late.
void SharedArena::pass_to(Peer& peer, size_t num_chunks) const {
  using Sending = comm::DescriptorConnection::Sending;
  while (peer.num_passed < num_chunks) {
    const Descriptor exported = arena_->export_descriptor(peer.num_passed);
    const auto index = static_cast<int64_t>(peer.num_passed);
    if (peer.connection.send(exported, index) != Sending::kDone) return;
    ++peer.num_passed;
  }
}

NoSharedArenas::NoSharedArenas() {
  ++num_forbidding;
}

NoSharedArenas::~NoSharedArenas() {
  --num_forbidding;
}

}  // namespace crossdock::cuda
