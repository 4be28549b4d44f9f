#include "core/cuda/pinned_memory.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <mutex>

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

}  // namespace crossdock::cuda
