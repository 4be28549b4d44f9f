#include "comm/window.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "core/check.hpp"

namespace crossdock::comm {
namespace {

constexpr int64_t kPageBytes = 4096;

[[noreturn]] void throw_errno(const std::string& what, const char* hint) {
  throw Error(ErrorCode::kCommunication, concat(what, ": ", std::strerror(errno), "; ", hint));
}

}  // namespace

// An open memory file and its mapping.
class WindowPool::Mapping {
 public:
  Mapping(int descriptor, int64_t num_bytes)
      : descriptor_(descriptor), num_bytes_(static_cast<size_t>(num_bytes)) {
    void* address = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (address == MAP_FAILED) {
      close(descriptor_);
      throw_errno(concat("cannot map a peer window of ", num_bytes, " bytes"),
                  "is there enough memory on this node?");
    }
    address_ = static_cast<std::byte*>(address);
    madvise(address_, num_bytes_, MADV_HUGEPAGE);  // a hint; most systems have it off for shm
  }
  ~Mapping() {
    munmap(address_, num_bytes_);
    close(descriptor_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* address() const { return address_; }
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
  size_t num_bytes_;
  std::byte* address_ = nullptr;
};

struct WindowPool::Block {
  uint64_t number = 0;
  int64_t num_bytes = 0;
  std::byte* address = nullptr;
  Buffer memory;                     // threads
  std::unique_ptr<Mapping> mapping;  // processes
  bool leased = false;
};

struct WindowPool::State {
  mutable std::mutex mutex;
  std::vector<std::shared_ptr<Block>> blocks;
};

WindowPool::WindowPool(Communicator& communicator)
    : communicator_(communicator), state_(std::make_shared<State>()) {}

WindowPool::~WindowPool() = default;

std::shared_ptr<WindowPool::Block> WindowPool::make_block(int64_t num_bytes) {
  auto block = std::make_shared<Block>();
  block->num_bytes = num_bytes;
  if (communicator_.shares_address_space()) {
    block->memory = Buffer(num_bytes);
    block->address = block->memory.data();
    communicator_.keep_alive(block->memory.owner());
    return block;
  }
  const int descriptor = memfd_create("crossdock-window", MFD_CLOEXEC);
  if (descriptor < 0) throw_errno("cannot make a memory file", "memfd_create must be allowed");
  if (posix_fallocate(descriptor, 0, num_bytes) != 0) {
    close(descriptor);
    throw Error(ErrorCode::kCommunication, concat("cannot get ", num_bytes,
                                                  " bytes of shared memory for a peer window; free "
                                                  "memory or use fewer tokens per step"));
  }
  block->mapping = std::make_unique<Mapping>(descriptor, num_bytes);
  block->address = block->mapping->address();
  return block;
}

Buffer WindowPool::take(int64_t num_bytes) {
  CROSSDOCK_CHECK(num_bytes >= 0, "a window's size must not be negative, got ", num_bytes);
  if (num_bytes == 0) return {};
  const int64_t wanted = (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::shared_ptr<Block> found;
  const std::lock_guard lock(state_->mutex);
  for (const auto& block : state_->blocks) {
    const bool fits =
        !block->leased && block->num_bytes >= wanted && block->num_bytes <= 2 * wanted;
    if (fits && (!found || block->num_bytes < found->num_bytes)) found = block;
  }
  if (!found) {
    found = make_block(wanted);
    found->number = state_->blocks.size() + 1;
    state_->blocks.push_back(found);
  }
  found->leased = true;
  std::byte* address = found->address;
  std::shared_ptr<void> owner(address, [block = found, state = state_](void*) {
    const std::lock_guard guard(state->mutex);
    block->leased = false;
  });
  return {std::move(owner), address, num_bytes, Device{}};
}

std::optional<WindowHandle> WindowPool::find(const void* data, int64_t num_bytes) const {
  if (num_bytes == 0) return WindowHandle{};
  const auto* begin = static_cast<const std::byte*>(data);
  const std::lock_guard lock(state_->mutex);
  for (const auto& block : state_->blocks) {
    if (begin < block->address || begin + num_bytes > block->address + block->num_bytes) continue;
    return WindowHandle{.block = block->number,
                        .block_bytes = block->num_bytes,
                        .offset = begin - block->address,
                        .owner_address = reinterpret_cast<uint64_t>(block->address),
                        .owner_process = getpid(),
                        .owner_descriptor = block->mapping ? block->mapping->descriptor() : -1};
  }
  return std::nullopt;
}

std::byte* WindowPool::reach(int peer, const WindowHandle& handle) {
  if (handle.block == 0) return nullptr;
  if (communicator_.shares_address_space() || peer == communicator_.rank()) {
    return reinterpret_cast<std::byte*>(handle.owner_address) + handle.offset;  // NOLINT
  }
  std::unique_ptr<Mapping>& mapping = peer_blocks_[{peer, handle.block}];
  if (!mapping) {
    const std::string path =
        concat("/proc/", handle.owner_process, "/fd/", handle.owner_descriptor);
    const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
      throw_errno(concat("cannot open the window of rank ", peer, " (", path, ")"),
                  "ranks of a node must run as one user and see each other's processes; use "
                  "strategy alltoall where they do not");
    }
    mapping = std::make_unique<Mapping>(descriptor, handle.block_bytes);
  }
  return mapping->address() + handle.offset;
}

int64_t WindowPool::bytes_held() const {
  const std::lock_guard lock(state_->mutex);
  int64_t total = 0;
  for (const auto& block : state_->blocks) total += block->num_bytes;
  return total;
}

}  // namespace crossdock::comm
