#include "core/cuda/host_words.hpp"

#include <cuda_runtime.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
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
