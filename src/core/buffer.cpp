#include "crossdock/buffer.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "core/check.hpp"

namespace crossdock {
namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = size_t{2} << 20;

// Large blocks ask for huge pages: rows are written in scattered order, and with small pages a
// large part of the time goes into page faults and address translation.
std::shared_ptr<void> allocate_host(int64_t num_bytes) {
  const auto wanted = static_cast<size_t>(num_bytes);
  const size_t alignment = wanted >= kHugePageBytes ? kHugePageBytes : kAlignment;
  const size_t rounded = (wanted + alignment - 1) & ~(alignment - 1);
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  if (alignment == kHugePageBytes) madvise(memory, rounded, MADV_HUGEPAGE);  // a hint; may fail
  return {memory, [](void* pointer) { std::free(pointer); }};
}

}  // namespace

Buffer::Buffer(int64_t num_bytes, Device device) : num_bytes_(num_bytes), device_(device) {
  CROSSDOCK_CHECK(num_bytes >= 0, "a buffer's size must not be negative, got ", num_bytes);
  CROSSDOCK_CHECK(device.is_cpu(), "host buffers live on the CPU; device memory has its own pool");
  if (num_bytes == 0) return;
  owner_ = allocate_host(num_bytes);
  data_ = static_cast<std::byte*>(owner_.get());
}

Buffer::Buffer(std::shared_ptr<void> owner, std::byte* data, int64_t num_bytes, Device device)
    : owner_(std::move(owner)), data_(data), num_bytes_(num_bytes), device_(device) {}

TensorView Buffer::view(DType dtype, Shape shape) const {
  const TensorView view(data_, dtype, shape, device_);
  CROSSDOCK_CHECK(view.num_bytes() <= num_bytes_, "a tensor of shape ", shape.to_string(), " ",
                  name_of(dtype), " needs ", view.num_bytes(), " bytes, the buffer has ",
                  num_bytes_);
  return view;
}

// Free blocks by size. A request takes the smallest block that fits, if less than half of it would
// be wasted; otherwise a new one is made, in place of the largest free one that is up to half too
// small: sizes change from step to step, and every new record would else leave a block behind.
struct BufferPool::State {
  mutable std::mutex mutex;
  std::multimap<int64_t, std::shared_ptr<void>> free_blocks;
  int64_t bytes_in_use = 0;
  int64_t bytes_free = 0;
};

BufferPool::BufferPool() : state_(std::make_shared<State>()) {}
BufferPool::~BufferPool() = default;

Buffer BufferPool::take(int64_t num_bytes) {
  CROSSDOCK_CHECK(num_bytes >= 0, "a buffer's size must not be negative, got ", num_bytes);
  if (num_bytes == 0) return {};
  int64_t block_bytes = (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::shared_ptr<void> block;
  {
    const std::lock_guard lock(state_->mutex);
    const auto found = state_->free_blocks.lower_bound(block_bytes);
    if (found != state_->free_blocks.end() && found->first <= 2 * block_bytes) {
      block_bytes = found->first;
      block = std::move(found->second);
      state_->free_blocks.erase(found);
      state_->bytes_free -= block_bytes;
    } else if (found != state_->free_blocks.begin() && 2 * std::prev(found)->first >= block_bytes) {
      state_->bytes_free -= std::prev(found)->first;
      state_->free_blocks.erase(std::prev(found));
    }
  }
  if (!block) block = allocate_host(block_bytes);
  {
    const std::lock_guard lock(state_->mutex);
    state_->bytes_in_use += block_bytes;
  }
  auto* data = static_cast<std::byte*>(block.get());
  // The last owner gives the block back; if the pool is gone, the block goes with its owner.
  std::shared_ptr<void> owner(
      data, [block, block_bytes, pool = std::weak_ptr<State>(state_)](void*) mutable {
        const std::shared_ptr<State> state = pool.lock();
        if (!state) return;
        const std::lock_guard lock(state->mutex);
        state->bytes_in_use -= block_bytes;
        state->bytes_free += block_bytes;
        state->free_blocks.emplace(block_bytes, std::move(block));
      });
  return {std::move(owner), data, num_bytes, Device{}};
}

OwnedTensor BufferPool::take(DType dtype, Shape shape) {
  const Buffer buffer = take(shape.num_elements() * size_of(dtype));
  return {.view = buffer.view(dtype, shape), .owner = buffer.owner()};
}

int64_t BufferPool::bytes_in_use() const {
  const std::lock_guard lock(state_->mutex);
  return state_->bytes_in_use;
}

int64_t BufferPool::bytes_held() const {
  const std::lock_guard lock(state_->mutex);
  return state_->bytes_in_use + state_->bytes_free;
}

}  // namespace crossdock
