#include "core/cuda/device_pool.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"

namespace crossdock::cuda {
namespace {

// Allocations of a multiple of this size are not parts of larger ones inside the driver, so that
// another process can map each by itself.
constexpr int64_t kBlockUnit = int64_t{2} << 20;

int64_t round_up(int64_t num_bytes) {
  return (num_bytes + kBlockUnit - 1) / kBlockUnit * kBlockUnit;
}

std::shared_ptr<void> allocate(int64_t num_bytes, int device) {
  const DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  CROSSDOCK_CUDA(cudaMalloc(&memory, static_cast<size_t>(num_bytes)));
  return {memory, [](void* pointer) { cudaFree(pointer); }};
}

struct Block {
  std::shared_ptr<void> memory;
  std::shared_ptr<OwnedEvent> released;  // recorded in `stream` at the last release
  cudaStream_t stream = nullptr;
};

}  // namespace

Buffer allocate_device(int64_t num_bytes, int device) {
  CROSSDOCK_CHECK(num_bytes >= 0, "a buffer's size must not be negative, got ", num_bytes);
  const Device where{.kind = DeviceKind::kCuda, .index = device};
  if (num_bytes == 0) return {nullptr, nullptr, 0, where};
  std::shared_ptr<void> memory = allocate(round_up(num_bytes), device);
  auto* data = static_cast<std::byte*>(memory.get());
  return {std::move(memory), data, num_bytes, where};
}

Buffer allocate_pinned(int64_t num_bytes) {
  void* memory = nullptr;
  const RelaxedCapture relaxed;
  CROSSDOCK_CUDA(cudaHostAlloc(&memory, static_cast<size_t>(num_bytes),
                               cudaHostAllocPortable | cudaHostAllocMapped));
  auto* data = static_cast<std::byte*>(memory);
  std::fill(data, data + num_bytes, std::byte{0});
  return {std::shared_ptr<void>(memory, [](void* pointer) { cudaFreeHost(pointer); }), data,
          num_bytes, Device{}};
}

struct DevicePool::State {
  int device = 0;
  mutable std::mutex mutex;
  std::multimap<int64_t, Block> free_blocks;
  std::map<const std::byte*, int64_t> used_blocks;  // base -> bytes
  int64_t bytes_in_use = 0;
  int64_t bytes_free = 0;

  // The smallest free block that fits without wasting more than half of it, one of this stream
  // first; an empty one if there is none.
  Block find(int64_t& block_bytes, cudaStream_t stream) {
    const std::lock_guard lock(mutex);
    const auto begin = free_blocks.lower_bound(block_bytes);
    const auto end = free_blocks.upper_bound(2 * block_bytes);
    auto found = begin;
    for (auto it = begin; it != end; ++it) {
      if (it->second.stream != stream) continue;
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
    used_blocks.emplace(static_cast<const std::byte*>(block.memory.get()), block_bytes);
  }

  void give_back(int64_t block_bytes, Block block) {
    const std::lock_guard lock(mutex);
    used_blocks.erase(static_cast<const std::byte*>(block.memory.get()));
    bytes_in_use -= block_bytes;
    bytes_free += block_bytes;
    free_blocks.emplace(block_bytes, std::move(block));
  }

  // Takes the block out of circulation. While a graph is being recorded nothing may be freed, so it
  // is kept until the pool goes; otherwise the caller frees it, which waits for the device.
  void retire(int64_t block_bytes, Block& block, bool keep) {
    const std::lock_guard lock(mutex);
    used_blocks.erase(static_cast<const std::byte*>(block.memory.get()));
    bytes_in_use -= block_bytes;
    if (keep) retired.push_back(std::move(block));
  }

  std::vector<Block> retired;
};

DevicePool::DevicePool(int device) : state_(std::make_shared<State>()) {
  state_->device = device;
}
DevicePool::~DevicePool() = default;

int DevicePool::device() const {
  return state_->device;
}

Buffer DevicePool::take(int64_t num_bytes, cudaStream_t stream) {
  CROSSDOCK_CHECK(num_bytes >= 0, "a buffer's size must not be negative, got ", num_bytes);
  const Device where{.kind = DeviceKind::kCuda, .index = state_->device};
  if (num_bytes == 0) return {nullptr, nullptr, 0, where};
  int64_t block_bytes = round_up(num_bytes);
  const bool captured = is_capturing(stream);
  Block block = captured ? Block{} : state_->find(block_bytes, stream);
  if (!block.memory) {
    block.memory = allocate(block_bytes, state_->device);
    block.released = std::make_shared<OwnedEvent>(state_->device);
  } else if (block.stream != stream) {
    block.released->make_wait(stream);
  }
  block.stream = stream;
  state_->hand_out(block_bytes, block);
  auto* data = static_cast<std::byte*>(block.memory.get());
  std::shared_ptr<void> owner(data, [block = std::move(block), block_bytes, captured,
                                     pool = std::weak_ptr<State>(state_)](void*) mutable {
    const std::shared_ptr<State> state = pool.lock();
    if (!state) return;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(block.stream, &capture);
    const bool recording = capture != cudaStreamCaptureStatusNone;
    if (captured || recording ||
        cudaEventRecord(block.released->get(), block.stream) != cudaSuccess) {
      cudaGetLastError();
      state->retire(block_bytes, block, recording);
      return;
    }
    state->give_back(block_bytes, std::move(block));
  });
  return {std::move(owner), data, num_bytes, where};
}

std::shared_ptr<const void> DevicePool::memory() const {
  return state_;
}

std::optional<MemoryBlock> DevicePool::find(const void* data) const {
  const auto* address = static_cast<const std::byte*>(data);
  const std::lock_guard lock(state_->mutex);
  auto after = state_->used_blocks.upper_bound(address);
  if (after == state_->used_blocks.begin()) return std::nullopt;
  const auto& [base, num_bytes] = *--after;
  if (address >= base + num_bytes) return std::nullopt;
  return MemoryBlock{.base = const_cast<std::byte*>(base), .num_bytes = num_bytes};
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
