#include "core/cuda/device_pool.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "core/process.hpp"
#include "core/tensor_memory.hpp"

namespace crossdock::cuda {
namespace {

constexpr uint64_t kLeastBytes = uint64_t{64} << 10;

struct PinnedBlocks {
  std::mutex mutex;
  std::multimap<uint64_t, void*> unused;  // by size
};

// Never destroyed: leases may outlive static objects, and the memory goes with the process.
PinnedBlocks& pinned_blocks() {
  static auto* instance = new PinnedBlocks;
  return *instance;
}

// Null if there is no unused block of this size.
void* take_unused(uint64_t size) {
  PinnedBlocks& all = pinned_blocks();
  const std::lock_guard lock(all.mutex);
  const auto found = all.unused.find(size);
  if (found == all.unused.end()) return nullptr;
  void* memory = found->second;
  all.unused.erase(found);
  return memory;
}

}  // namespace

Buffer lease_pinned_memory(int64_t num_bytes) {
  // Powers of two, so leases of similar sizes use the same blocks.
  const uint64_t size = std::bit_ceil(std::max(static_cast<uint64_t>(num_bytes), kLeastBytes));
  void* memory = take_unused(size);
  if (memory == nullptr) {
    const RelaxedCapture relaxed;
    CROSSDOCK_CUDA(cudaHostAlloc(&memory, size, cudaHostAllocPortable));
  }
  const auto give_back = [size](void* block) {
    PinnedBlocks& all = pinned_blocks();
    const std::lock_guard lock(all.mutex);
    all.unused.emplace(size, block);
  };
  return {std::shared_ptr<void>(memory, give_back), static_cast<std::byte*>(memory), num_bytes,
          Device{}};
}

namespace {

constexpr int64_t kSlabBytes = int64_t{64} << 10;

struct Words {
  std::mutex mutex;
  std::vector<std::byte*> free;
};

// Never destroyed: leases may outlive static objects, and the memory goes with the process.
Words& words() {
  static auto* instance = new Words;
  return *instance;
}

void add_slab(Words& all) {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  CROSSDOCK_CUDA(cudaHostAlloc(&memory, kSlabBytes, cudaHostAllocPortable | cudaHostAllocMapped));
  for (int64_t offset = 0; offset < kSlabBytes; offset += kHostWordBytes) {
    all.free.push_back(static_cast<std::byte*>(memory) + offset);
  }
}

}  // namespace

Buffer lease_host_words() {
  Words& all = words();
  const std::lock_guard lock(all.mutex);
  if (all.free.empty()) add_slab(all);
  std::byte* data = all.free.back();
  all.free.pop_back();
  std::memset(data, 0, kHostWordBytes);
  const auto give_back = [](void* memory) {
    Words& owner = words();
    const std::lock_guard again(owner.mutex);
    owner.free.push_back(static_cast<std::byte*>(memory));
  };
  return {std::shared_ptr<void>(data, give_back), data, kHostWordBytes, Device{}};
}

namespace {

constexpr int64_t kBlockUnit = int64_t{64} << 10;

struct Block {
  std::shared_ptr<void> memory;
  std::shared_ptr<OwnedEvent> released;  // recorded in `stream` at the last release
  cudaStream_t stream = nullptr;
  bool is_recorded = false;      // `released`; if not, the stream is the lasting one
  bool follows_threads = false;  // see DevicePool::follow_threads

  void record() {
    if (std::exchange(is_recorded, true)) return;
    released->record(stream);
  }
};

struct UsedBlock {
  int64_t num_bytes = 0;
  std::weak_ptr<const void> owner;
};

}  // namespace

struct DevicePool::State {
  std::shared_ptr<DeviceArena> arena;
  std::atomic<bool> follows_threads = false;
  mutable std::mutex mutex;
  std::optional<cudaStream_t> lasting;  // see DevicePool::set_lasting_stream
  std::multimap<int64_t, Block> free_blocks;
  std::map<const std::byte*, UsedBlock> used_blocks;  // by base
  int64_t bytes_in_use = 0;
  int64_t bytes_free = 0;

  // The smallest free block that is large enough and at most half wasted, preferably of this
  // stream; an empty one if there is none. A graph cannot wait for work queued before it, so for a
  // graph the block's work must be known to have finished. A release that is not yet recorded
  // cannot be recorded while its stream is being captured.
  Block find(int64_t& block_bytes, cudaStream_t stream, bool captured) {
    const std::lock_guard lock(mutex);
    const auto begin = free_blocks.lower_bound(block_bytes);
    const auto end = free_blocks.upper_bound(2 * block_bytes);
    auto found = end;
    for (auto it = begin; it != end; ++it) {
      const Block& block = it->second;
      if (captured) {
        if (!block.is_recorded || !block.released->has_passed()) continue;
      } else if (block.stream != stream) {
        if (found == end && (block.is_recorded || !is_capturing(block.stream))) found = it;
        continue;
      }
      found = it;
      break;
    }
    Block block;
    if (found != end) {
      block_bytes = found->first;
      block = std::move(found->second);
      free_blocks.erase(found);
      bytes_free -= block_bytes;
    }
    return block;
  }

  void hand_out(int64_t block_bytes, const Block& block) {
    const std::lock_guard lock(mutex);
    bytes_in_use += block_bytes;
    used_blocks.emplace(static_cast<const std::byte*>(block.memory.get()),
                        UsedBlock{.num_bytes = block_bytes, .owner = {}});
  }

  void set_owner(const std::byte* base, const std::shared_ptr<const void>& owner) {
    const std::lock_guard lock(mutex);
    used_blocks[base].owner = owner;
  }

  // The used block that contains this address; null if none does. REQUIRES: mutex is held.
  const std::pair<const std::byte* const, UsedBlock>* used_at(const void* data) const {
    const auto* address = static_cast<const std::byte*>(data);
    const auto after = used_blocks.upper_bound(address);
    if (after == used_blocks.begin()) return nullptr;
    const auto& found = *std::prev(after);
    return address < found.first + found.second.num_bytes ? &found : nullptr;
  }

  void give_back(int64_t block_bytes, Block block) {
    const std::lock_guard lock(mutex);
    insert(block_bytes, std::move(block));
  }

  // The same for a block whose release need not be recorded yet; false if it must be.
  bool give_back_unrecorded(int64_t block_bytes, Block& block) {
    const std::lock_guard lock(mutex);
    if (lasting != block.stream) return false;
    insert(block_bytes, std::move(block));
    return true;
  }

  void set_lasting(std::optional<cudaStream_t> stream) {
    const std::lock_guard lock(mutex);
    if (lasting == stream) return;
    const bool can_record = lasting && !is_capturing(*lasting);
    for (auto it = free_blocks.begin(); it != free_blocks.end();) {
      Block& block = it->second;
      if (block.is_recorded || can_record) {
        block.record();
        ++it;
      } else {
        bytes_free -= it->first;
        retired.push_back(std::move(block));
        it = free_blocks.erase(it);
      }
    }
    lasting = stream;
  }

  // Keeps the block out of use until the pool is destroyed: it is unknown when its stream is done
  // with it (for example, because a graph is being captured).
  void retire(int64_t block_bytes, Block block) {
    const std::lock_guard lock(mutex);
    used_blocks.erase(static_cast<const std::byte*>(block.memory.get()));
    bytes_in_use -= block_bytes;
    retired.push_back(std::move(block));
  }

  std::vector<Block> retired;

 private:
  // REQUIRES: mutex is held.
  void insert(int64_t block_bytes, Block block) {
    used_blocks.erase(static_cast<const std::byte*>(block.memory.get()));
    bytes_in_use -= block_bytes;
    bytes_free += block_bytes;
    free_blocks.emplace(block_bytes, std::move(block));
  }
};

struct DevicePool::AllPools {
  std::mutex mutex;
  std::vector<std::weak_ptr<State>> states;
};

DevicePool::AllPools& DevicePool::all_pools() {
  static constinit PerProcess<AllPools> all;
  return all.get();
}

DevicePool::DevicePool(std::shared_ptr<DeviceArena> arena) : state_(std::make_shared<State>()) {
  state_->arena = std::move(arena);
  AllPools& all = all_pools();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.states, [](const auto& state) { return state.expired(); });
  all.states.push_back(state_);
}

DevicePool::~DevicePool() {
  const DeviceGuard guard(state_->arena->device(), std::nothrow);
  try {
    state_->set_lasting(std::nullopt);
  } catch (const Error&) {
    // The context is lost: nothing uses the memory anymore.
  }
}

void DevicePool::set_lasting_stream(cudaStream_t stream) {
  state_->set_lasting(stream);
}

DeviceArena& DevicePool::arena() const {
  return *state_->arena;
}

Buffer DevicePool::take(int64_t num_bytes, cudaStream_t stream) {
  CROSSDOCK_CHECK(num_bytes >= 0, "a buffer's size must not be negative, got ", num_bytes);
  CROSSDOCK_ASSERT(stream != cudaStreamPerThread);
  const Device where{.kind = DeviceKind::kCuda, .index = state_->arena->device()};
  if (num_bytes == 0) return {nullptr, nullptr, 0, where};
  const RelaxedCapture relaxed;
  int64_t block_bytes = round_up(num_bytes, kBlockUnit);
  const bool captured = is_capturing(stream);
  Block block = state_->find(block_bytes, stream, captured);
  if (!block.memory) {
    block.released = std::make_shared<OwnedEvent>(state_->arena->device());
    block.memory = state_->arena->allocate(block_bytes, block.released);
  } else if (!captured && block.stream != stream) {
    block.record();
    block.released->make_wait(stream);
  }
  block.stream = stream;
  block.is_recorded = false;
  block.follows_threads = state_->follows_threads;
  state_->hand_out(block_bytes, block);
  auto* data = static_cast<std::byte*>(block.memory.get());
  std::shared_ptr<void> owner(data, [block = std::move(block), block_bytes, device = where.index,
                                     pool = std::weak_ptr<State>(state_)](void*) mutable {
    const DeviceGuard guard(device,
                            std::nothrow);  // the stream may be the default stream of a device
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(block.stream, &capture);
    const bool recording = capture != cudaStreamCaptureStatusNone;
    const std::shared_ptr<State> state = pool.lock();
    const bool may_wait = state && !recording && !block.follows_threads;
    if (may_wait && state->give_back_unrecorded(block_bytes, block)) return;
    block.is_recorded =
        !recording && (!block.follows_threads || wait_for_thread(block.stream, *block.released)) &&
        cudaEventRecord(block.released->get(), block.stream) == cudaSuccess;
    if (!state) return;
    if (block.is_recorded) {
      state->give_back(block_bytes, std::move(block));
    } else {
      state->retire(block_bytes, std::move(block));
    }
  });
  state_->set_owner(data, owner);
  return {std::move(owner), data, num_bytes, where};
}

void DevicePool::follow_threads(bool are_followed) {
  state_->follows_threads = are_followed;
}

std::shared_ptr<const void> DevicePool::memory() const {
  return state_;
}

std::optional<MemoryBlock> DevicePool::find(const void* data) const {
  const std::lock_guard lock(state_->mutex);
  const auto* const used = state_->used_at(data);
  if (used == nullptr) return std::nullopt;
  return MemoryBlock{.base = const_cast<std::byte*>(used->first),
                     .num_bytes = used->second.num_bytes};
}

std::shared_ptr<const void> DevicePool::owner_of(const void* data) {
  AllPools& all = all_pools();
  const std::lock_guard all_lock(all.mutex);
  for (const std::weak_ptr<State>& weak : all.states) {
    const std::shared_ptr<State> state = weak.lock();
    if (!state) continue;
    const std::lock_guard lock(state->mutex);
    if (const auto* const used = state->used_at(data)) return used->second.owner.lock();
  }
  return nullptr;
}

int64_t DevicePool::bytes_in_use() const {
  const std::lock_guard lock(state_->mutex);
  return state_->bytes_in_use;
}

int64_t DevicePool::bytes_held() const {
  const std::lock_guard lock(state_->mutex);
  return state_->bytes_in_use + state_->bytes_free;
}

}  // namespace crossdock::cuda
