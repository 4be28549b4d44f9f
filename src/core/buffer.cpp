#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/block_ledger.hpp"
#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {
namespace {

constexpr int64_t kSlack = 16;  // one sixteenth of a request, or of the peak need, may be wasted

}  // namespace

BlockLedger::Grant BlockLedger::take(int64_t wanted_bytes, BlockUse use) {
  needed_ += wanted_bytes;
  most_needed_ = std::max(most_needed_, needed_);
  const auto found = free_.lower_bound(wanted_bytes);
  const int64_t most_bytes = wanted_bytes + wanted_bytes / kSlack;
  if (found != free_.end() && (use == BlockUse::kScratch || *found <= most_bytes)) {
    const int64_t block_bytes = *found;
    free_.erase(found);
    in_use_ += block_bytes;
    return {.block_bytes = block_bytes};
  }
  Grant grant{.block_bytes = wanted_bytes, .is_new = true};
  while (!free_.empty() && held_ + wanted_bytes > most_needed_ + most_needed_ / kSlack) {
    // Prefer a block that is slightly too small: it has been outgrown.
    auto nearest = free_.lower_bound(wanted_bytes);
    if (nearest != free_.begin()) --nearest;
    grant.dropped.push_back(*nearest);
    held_ -= *nearest;
    free_.erase(nearest);
  }
  held_ += wanted_bytes;
  in_use_ += wanted_bytes;
  return grant;
}

void BlockLedger::give_back(int64_t block_bytes, int64_t wanted_bytes) {
  free_.insert(block_bytes);  // first: it may throw
  needed_ -= wanted_bytes;
  in_use_ -= block_bytes;
}

void BlockLedger::cancel(int64_t block_bytes, int64_t wanted_bytes) {
  needed_ -= wanted_bytes;
  in_use_ -= block_bytes;
  held_ -= block_bytes;
}

void FreeRanges::add(int64_t offset, int64_t num_bytes) {
  parts_.emplace(offset, num_bytes);
  by_size_.emplace(num_bytes, offset);
}

void FreeRanges::remove(Parts::iterator part) {
  by_size_.erase({part->second, part->first});
  parts_.erase(part);
}

std::optional<int64_t> FreeRanges::take(int64_t num_bytes) {
  const auto found = by_size_.lower_bound({num_bytes, 0});
  if (found == by_size_.end()) return std::nullopt;
  const auto [part_bytes, offset] = *found;
  remove(parts_.find(offset));
  if (part_bytes > num_bytes) add(offset + num_bytes, part_bytes - num_bytes);
  return offset;
}

void FreeRanges::give_back(int64_t offset, int64_t num_bytes) {
  const auto after = parts_.lower_bound(offset);
  if (after != parts_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      num_bytes += before->second;
      remove(before);
    }
  }
  if (after != parts_.end() && after->first == offset + num_bytes) {
    num_bytes += after->second;
    remove(after);
  }
  add(offset, num_bytes);
}

int64_t FreeRanges::bytes_before(int64_t end) const {
  const auto after = parts_.lower_bound(end);
  if (after == parts_.begin()) return 0;
  const auto& [offset, num_bytes] = *std::prev(after);
  return offset + num_bytes == end ? num_bytes : 0;
}

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePageBytes = size_t{2} << 20;

// Large blocks use huge pages: rows are written in scattered order, and with small pages much of
// the time is spent on page faults and address translation.
std::shared_ptr<void> allocate_host(int64_t num_bytes) {
  if (num_bytes > kMaxBytes) throw std::bad_alloc();
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
  CROSSDOCK_CHECK(device.is_cpu(), "host buffers are on the CPU; device memory has its own pool");
  if (num_bytes == 0) return;
  owner_ = allocate_host(num_bytes);
  data_ = static_cast<std::byte*>(owner_.get());
}

Buffer::Buffer(std::shared_ptr<void> owner, std::byte* data, int64_t num_bytes, Device device)
    : owner_(std::move(owner)), data_(data), num_bytes_(num_bytes), device_(device) {}

TensorView Buffer::view(DType dtype, Shape shape) const& {
  const TensorView view(data_, dtype, shape, device_);
  CROSSDOCK_CHECK(view.num_bytes() <= num_bytes_, "a tensor of shape ", shape.to_string(), " ",
                  name_of(dtype), " needs ", view.num_bytes(), " bytes, the buffer has ",
                  num_bytes_);
  return view;
}

struct BufferPool::State : std::enable_shared_from_this<BufferPool::State> {
  mutable std::mutex mutex;
  BlockLedger ledger;
  std::multimap<int64_t, std::shared_ptr<void>> free_blocks;  // by size, as in the ledger

  std::shared_ptr<void> remove_free(int64_t block_bytes) {
    auto node = free_blocks.extract(free_blocks.find(block_bytes));
    return std::move(node.mapped());
  }

  Buffer take(int64_t num_bytes, BlockUse use) {
    CROSSDOCK_CHECK(num_bytes >= 0, "a buffer's size must not be negative, got ", num_bytes);
    if (num_bytes == 0) return {};
    if (num_bytes > kMaxBytes) throw std::bad_alloc();
    const int64_t wanted_bytes = round_up(num_bytes, kPageBytes);
    std::shared_ptr<void> block;
    std::vector<std::shared_ptr<void>> dropped;  // freed outside the lock
    BlockLedger::Grant grant;
    {
      const std::lock_guard lock(mutex);
      grant = ledger.take(wanted_bytes, use);
      if (!grant.is_new) block = remove_free(grant.block_bytes);
      for (const int64_t bytes : grant.dropped) dropped.push_back(remove_free(bytes));
    }
    dropped.clear();
    try {
      if (!block) block = allocate_host(grant.block_bytes);
    } catch (const std::bad_alloc&) {
      const std::lock_guard lock(mutex);
      ledger.cancel(grant.block_bytes, wanted_bytes);
      throw;
    }
    auto* data = static_cast<std::byte*>(block.get());
    // The last owner returns the block to the pool; if the pool is gone, the block is freed.
    std::shared_ptr<void> owner(data, [block, block_bytes = grant.block_bytes, wanted_bytes,
                                       pool = weak_from_this()](void*) mutable {
      const std::shared_ptr<State> state = pool.lock();
      if (state) state->put_back(block, block_bytes, wanted_bytes);
      block.reset();
    });
    return {std::move(owner), data, num_bytes, Device{}};
  }

  // Frees the block if there is not even memory to note that it is free.
  void put_back(const std::shared_ptr<void>& block, int64_t block_bytes,
                int64_t wanted_bytes) noexcept {
    const std::lock_guard lock(mutex);
    auto noted = free_blocks.end();
    try {
      noted = free_blocks.emplace(block_bytes, block);
      ledger.give_back(block_bytes, wanted_bytes);
    } catch (const std::bad_alloc&) {
      if (noted != free_blocks.end()) free_blocks.erase(noted);
      ledger.cancel(block_bytes, wanted_bytes);
    }
  }
};

BufferPool::BufferPool() : state_(std::make_shared<State>()) {}
BufferPool::~BufferPool() = default;

Buffer BufferPool::take(int64_t num_bytes) {
  return state_->take(num_bytes, BlockUse::kResult);
}

Buffer BufferPool::take_scratch(int64_t num_bytes) {
  return state_->take(num_bytes, BlockUse::kScratch);
}

OwnedTensor BufferPool::take(DType dtype, Shape shape) {
  return owned_tensor(take(TensorView(nullptr, dtype, shape).num_bytes()), dtype, shape);
}

int64_t BufferPool::bytes_in_use() const {
  const std::lock_guard lock(state_->mutex);
  return state_->ledger.bytes_in_use();
}

int64_t BufferPool::bytes_held() const {
  const std::lock_guard lock(state_->mutex);
  return state_->ledger.bytes_held();
}

}  // namespace crossdock
