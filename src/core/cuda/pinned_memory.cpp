#include "core/cuda/pinned_memory.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

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

}  // namespace crossdock::cuda
