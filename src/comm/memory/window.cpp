#include "comm/memory/window.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/descriptor.hpp"
#include "core/tensor_memory.hpp"

namespace crossdock::comm {
namespace {

// A larger request cannot succeed, and the kernel might kill processes to find memory.
int64_t memory_of_this_machine() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

[[noreturn]] void throw_errno(const std::string& what, const char* hint) {
  throw Error(ErrorCode::kCommunication, concat(what, ": ", std::strerror(errno), "; ", hint));
}

// Returns 0 or the error number.
int reserve(int descriptor, int64_t num_bytes) {
  const WriteSignalBlock no_signals;
  return posix_fallocate(descriptor, 0, num_bytes);
}

}  // namespace

// An open memory file and its mapping.
class WindowPool::Mapping {
 public:
  Mapping(int descriptor, int64_t num_bytes) : descriptor_(descriptor) {
    try {
      map(num_bytes);
    } catch (...) {
      close(descriptor_);
      throw;
    }
  }
  ~Mapping() {
    unmap();
    close(descriptor_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  /// Maps the file again after it has grown. REQUIRES: the old address is not in use.
  void map_again(int64_t num_bytes) {
    unmap();
    map(num_bytes);
  }

  std::byte* address() const { return address_; }
  int descriptor() const { return descriptor_; }
  int64_t num_bytes() const { return static_cast<int64_t>(num_bytes_); }

 private:
  void map(int64_t num_bytes) {
    const auto size = static_cast<size_t>(num_bytes);
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (address == MAP_FAILED) {
      throw_errno(concat("cannot map a peer window of ", num_bytes, " bytes"),
                  "is there enough memory on this node?");
    }
    address_ = static_cast<std::byte*>(address);
    num_bytes_ = size;
    madvise(address_, num_bytes_, MADV_HUGEPAGE);  // a hint; off for shared memory on most systems
  }
  void unmap() {
    if (num_bytes_ > 0) munmap(address_, num_bytes_);
    num_bytes_ = 0;
  }

  int descriptor_;
  size_t num_bytes_ = 0;
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

WindowPool::WindowPool(Communicator& communicator, std::function<void()> check)
    : communicator_(communicator), check_(std::move(check)), state_(std::make_shared<State>()) {}

WindowPool::~WindowPool() = default;

// Replaces the memory of a block with memory of this size. REQUIRES: the block is not leased.
void WindowPool::allocate(Block& block, int64_t num_bytes) {
  block.num_bytes = 0;  // unusable if this fails
  if (communicator_.shares_address_space()) {
    block.memory = {};
    block.memory = Buffer(num_bytes);
    block.address = block.memory.data();
    block.num_bytes = num_bytes;
    return;
  }
  const bool is_new = block.mapping == nullptr;
  const int descriptor = is_new ? above_standard(memfd_create("crossdock-window", MFD_CLOEXEC))
                                : block.mapping->descriptor();
  if (descriptor < 0) throw_errno("cannot make a memory file", "memfd_create must be allowed");
  const int failure =
      num_bytes > memory_of_this_machine() ? ENOMEM : reserve(descriptor, num_bytes);
  if (failure != 0) {
    if (is_new) close(descriptor);
    throw Error(ErrorCode::kCommunication,
                concat("cannot get ", num_bytes,
                       " bytes of shared memory for a peer window: ", std::strerror(failure), "; ",
                       failure == EFBIG ? "raise the limit on file sizes (ulimit -f)"
                                        : "free memory or use fewer tokens per step"));
  }
  if (is_new) {
    block.mapping = std::make_unique<Mapping>(descriptor, num_bytes);
  } else {
    block.mapping->map_again(num_bytes);
  }
  block.address = block.mapping->address();
  block.num_bytes = num_bytes;
}

Buffer WindowPool::take(int64_t num_bytes) {
  CROSSDOCK_CHECK(num_bytes >= 0, "a window's size must not be negative, got ", num_bytes);
  check_();
  if (num_bytes == 0) return {};
  if (num_bytes > kMaxBytes) throw std::bad_alloc();
  const int64_t wanted = round_up(num_bytes, kPageBytes);
  std::shared_ptr<Block> found;
  std::shared_ptr<Block> nearly;  // the largest that is too small, but at least half as large
  std::unique_lock lock(state_->mutex);
  for (const auto& block : state_->blocks) {
    if (block->leased) continue;
    if (block->num_bytes >= wanted && block->num_bytes <= 2 * wanted) {
      if (!found || block->num_bytes < found->num_bytes) found = block;
    } else if (block->num_bytes < wanted && 2 * block->num_bytes >= wanted) {
      if (!nearly || block->num_bytes > nearly->num_bytes) nearly = block;
    }
  }
  if (!found && nearly) {
    allocate(*nearly, wanted);
    found = nearly;
  } else if (!found) {
    found = std::make_shared<Block>();
    allocate(*found, wanted);
    communicator_.keep_alive(found);
    found->number = state_->blocks.size() + 1;
    state_->blocks.push_back(found);
  }
  found->leased = true;
  std::byte* address = found->address;
  lock.unlock();  // without memory for the owner, the block is given back at once
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
  if (mapping && mapping->num_bytes() < handle.block_bytes) mapping->map_again(handle.block_bytes);
  if (!mapping) {
    const std::string path =
        concat("/proc/", handle.owner_process, "/fd/", handle.owner_descriptor);
    const int descriptor = above_standard(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (descriptor < 0) {
      const int error = errno;
      const bool lacks_resources = error == EMFILE || error == ENFILE || error == ENOMEM;
      throw Error(ErrorCode::kCommunication,
                  concat("cannot open the window of rank ", peer, " (", path, "): ",
                         std::strerror(error), "; has that rank ended? Ranks on a node must ",
                         "run as one user and see each other's processes; otherwise use strategy ",
                         "alltoall"),
                  {.culprit = lacks_resources ? -1 : peer});
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
