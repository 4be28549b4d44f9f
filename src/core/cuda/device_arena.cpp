#include "core/cuda/device_arena.hpp"

#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

// The driver does not combine allocations of a multiple of this size into larger ones, so another
// process can map each of them separately.
constexpr int64_t kExportUnit = int64_t{2} << 20;

cudaMemLocation on_device(int device) {
  cudaMemLocation location{};
  location.type = cudaMemLocationTypeDevice;
  location.id = device;
  return location;
}

// Free memory that a pool keeps instead of returning it to the driver, and its initial size.
constexpr uint64_t kKeptBytes = uint64_t{64} << 20;

cudaMemPool_t make_pool(int device) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = on_device(device);
  cudaMemPool_t pool = nullptr;
  CROSSDOCK_CUDA(cudaMemPoolCreate(&pool, &properties));
  uint64_t kept = kKeptBytes;
  CROSSDOCK_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
  int waits = 0;  // an allocation must not make its stream wait for freed memory
  CROSSDOCK_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &waits));
  int num_devices = 0;
  CROSSDOCK_CUDA(cudaGetDeviceCount(&num_devices));
  for (int peer = 0; peer < num_devices; ++peer) {
    int possible = 0;
    if (peer != device) CROSSDOCK_CUDA(cudaDeviceCanAccessPeer(&possible, peer, device));
    if (possible == 0) continue;
    cudaMemAccessDesc access{};
    access.location = on_device(peer);
    access.flags = cudaMemAccessFlagsProtReadWrite;
    CROSSDOCK_CUDA(cudaMemPoolSetAccess(pool, &access, 1));
  }
  return pool;
}

// Small allocations then do not make the pool grow while kernels wait for each other. If there is
// no memory for it, later allocations report that.
void reserve(cudaMemPool_t pool, cudaStream_t stream) {
  void* memory = nullptr;
  if (cudaMallocFromPoolAsync(&memory, kKeptBytes, pool, stream) == cudaSuccess) {
    CROSSDOCK_CUDA(cudaFreeAsync(memory, stream));
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream));
  } else {
    cudaGetLastError();
  }
}

}  // namespace

std::shared_ptr<DeviceArena> DeviceArena::make(int device, bool is_exported) {
  // Never destroyed: memory may outlive static objects.
  static auto* mutex = new std::mutex;
  static auto* arenas = new std::map<std::pair<int, bool>, std::shared_ptr<DeviceArena>>;
  const std::lock_guard lock(*mutex);
  std::shared_ptr<DeviceArena>& arena = (*arenas)[{device, is_exported}];
  if (!arena) arena.reset(new DeviceArena(device, is_exported));
  return arena;
}

DeviceArena::DeviceArena(int device, bool is_exported)
    : device_(device), is_exported_(is_exported), stream_(device) {
  if (is_exported_) return;
  const CallGuard guard(device);
  pool_ = make_pool(device);
  reserve(pool_, stream());
}

std::shared_ptr<void> DeviceArena::allocate(int64_t num_bytes,
                                            std::shared_ptr<OwnedEvent> last_use) {
  CROSSDOCK_CHECK(num_bytes > 0, "an allocation must have a size, got ", num_bytes);
  const CallGuard guard(device_);
  MemoryBlock block{.base = nullptr, .num_bytes = num_bytes};
  if (is_exported_) {
    block = take_exported((num_bytes + kExportUnit - 1) / kExportUnit * kExportUnit);
  } else {
    free_unused();
    void* memory = nullptr;
    CROSSDOCK_CUDA(
        cudaMallocFromPoolAsync(&memory, static_cast<size_t>(num_bytes), pool_, stream()));
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream()));
    block.base = static_cast<std::byte*>(memory);
  }
  return {block.base, [self = shared_from_this(), block, last_use = std::move(last_use)](void*) {
            self->free(block, last_use);
          }};
}

MemoryBlock DeviceArena::take_exported(int64_t num_bytes) {
  if (const MemoryBlock block = take_unused(num_bytes, 2 * num_bytes); block.base != nullptr) {
    return block;
  }
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, static_cast<size_t>(num_bytes));
  if (status == cudaErrorMemoryAllocation) {
    const MemoryBlock larger = take_unused(num_bytes, std::numeric_limits<int64_t>::max());
    if (larger.base != nullptr) {
      cudaGetLastError();  // a larger unused block serves instead
      return larger;
    }
  }
  CROSSDOCK_CUDA(status);
  return {.base = static_cast<std::byte*>(memory), .num_bytes = num_bytes};
}

MemoryBlock DeviceArena::take_unused(int64_t least_bytes, int64_t most_bytes) {
  const std::lock_guard lock(mutex_);
  auto best = unused_.end();
  for (auto it = unused_.begin(); it != unused_.end(); ++it) {
    const int64_t num_bytes = it->block.num_bytes;
    if (num_bytes < least_bytes || num_bytes > most_bytes) continue;
    if (best != unused_.end() && num_bytes >= best->block.num_bytes) continue;
    if (it->is_done()) best = it;
  }
  if (best == unused_.end()) return {};
  const MemoryBlock block = best->block;
  unused_.erase(best);
  return block;
}

void DeviceArena::free(const MemoryBlock& block, const std::shared_ptr<OwnedEvent>& last_use) {
  {
    const std::lock_guard lock(mutex_);
    unused_.push_back({.block = block, .last_use = last_use});
  }
  if (!is_exported_) free_unused();
}

void DeviceArena::free_unused() {
  const RelaxedCapture relaxed;
  const std::lock_guard lock(mutex_);
  std::erase_if(unused_, [&](const Unused& unused) {
    if (!unused.is_done()) return false;
    cudaFreeAsync(unused.block.base, stream());
    return true;
  });
}

Buffer allocate_device(DeviceArena& arena, int64_t num_bytes) {
  std::shared_ptr<void> memory = arena.allocate(num_bytes);
  auto* data = static_cast<std::byte*>(memory.get());
  return {std::move(memory), data, num_bytes,
          Device{.kind = DeviceKind::kCuda, .index = arena.device()}};
}

}  // namespace crossdock::cuda
