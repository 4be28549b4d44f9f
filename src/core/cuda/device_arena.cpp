#include "core/cuda/device_arena.hpp"

#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/range_arena.hpp"
#include "core/sizes.hpp"

namespace crossdock::cuda {
namespace {

// The driver does not combine allocations of a multiple of this size into larger ones, so another
// process can map each of them separately.
constexpr int64_t kIpcUnit = int64_t{2} << 20;

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

// Grows the pool now, so small allocations do not do so while kernels wait for each other. If there
// is not enough memory, later allocations report it.
void reserve(cudaMemPool_t pool, cudaStream_t stream) {
  void* memory = nullptr;
  if (cudaMallocFromPoolAsync(&memory, kKeptBytes, pool, stream) == cudaSuccess) {
    CROSSDOCK_CUDA(cudaFreeAsync(memory, stream));
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream));
  } else {
    cudaGetLastError();
  }
}

// Memory of this process alone, allocated and freed in the arena's stream.
class PoolArena final : public DeviceArena {
 public:
  explicit PoolArena(int device) : DeviceArena(device) {
    const CallGuard guard(device);
    pool_ = make_pool(device);
    reserve(pool_, stream());
  }

 private:
  MemoryBlock take(int64_t num_bytes) override {
    free_unused();
    void* memory = nullptr;
    CROSSDOCK_CUDA(
        cudaMallocFromPoolAsync(&memory, static_cast<size_t>(num_bytes), pool_, stream()));
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream()));
    return {.base = static_cast<std::byte*>(memory), .num_bytes = num_bytes};
  }

  void give_back(const UnusedBlock& unused) override {
    {
      const std::lock_guard lock(mutex_);
      unused_.push_back(unused);
    }
    free_unused();
  }

  void free_unused() {
    const RelaxedCapture relaxed;
    const std::lock_guard lock(mutex_);
    std::erase_if(unused_, [&](const UnusedBlock& unused) {
      if (!unused.is_done()) return false;
      cudaFreeAsync(unused.block.base, stream());
      return true;
    });
  }

  cudaMemPool_t pool_ = nullptr;
  std::mutex mutex_;
  std::vector<UnusedBlock> unused_;  // still in use by the device
};

// Allocations that other processes map individually (cudaIpc). They are reused whole.
class IpcArena final : public DeviceArena {
 public:
  explicit IpcArena(int device) : DeviceArena(device) {}

 private:
  MemoryBlock take(int64_t num_bytes) override {
    const int64_t block_bytes = round_up(num_bytes, kIpcUnit);
    if (const MemoryBlock block = take_unused(block_bytes, 2 * block_bytes);
        block.base != nullptr) {
      return block;
    }
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, static_cast<size_t>(block_bytes));
    if (status == cudaErrorMemoryAllocation) {
      const MemoryBlock larger = take_unused(block_bytes, std::numeric_limits<int64_t>::max());
      if (larger.base != nullptr) {
        cudaGetLastError();  // a larger unused block serves instead
        return larger;
      }
    }
    CROSSDOCK_CUDA(status);
    return {.base = static_cast<std::byte*>(memory), .num_bytes = block_bytes};
  }

  // The smallest unused block of a size in [least_bytes, most_bytes]; an empty one if there is
  // none.
  MemoryBlock take_unused(int64_t least_bytes, int64_t most_bytes) {
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

  void give_back(const UnusedBlock& unused) override {
    const std::lock_guard lock(mutex_);
    unused_.push_back(unused);
  }

  std::mutex mutex_;
  std::vector<UnusedBlock> unused_;
};

std::shared_ptr<DeviceArena> make_arena(int device, MemorySharing sharing) {
  switch (sharing) {
    case MemorySharing::kNone:
      return std::make_shared<PoolArena>(device);
    case MemorySharing::kIpc:
      return std::make_shared<IpcArena>(device);
    case MemorySharing::kDescriptors:
    case MemorySharing::kFabric:
      break;
  }
  return std::make_shared<RangeArena>(device, sharing);
}

}  // namespace

std::shared_ptr<DeviceArena> DeviceArena::make(int device, MemorySharing sharing) {
  // Never destroyed: memory may outlive static objects.
  static auto* mutex = new std::mutex;
  static auto* arenas = new std::map<std::pair<int, MemorySharing>, std::shared_ptr<DeviceArena>>;
  const std::lock_guard lock(*mutex);
  std::shared_ptr<DeviceArena>& arena = (*arenas)[{device, sharing}];
  if (!arena) arena = make_arena(device, sharing);
  return arena;
}

std::shared_ptr<void> DeviceArena::allocate(int64_t num_bytes,
                                            std::shared_ptr<OwnedEvent> last_use) {
  CROSSDOCK_CHECK(num_bytes > 0, "an allocation must have a size, got ", num_bytes);
  const CallGuard guard(device_);
  const MemoryBlock block = take(num_bytes);
  return {block.base, [self = shared_from_this(), block, last_use = std::move(last_use)](void*) {
            self->give_back({.block = block, .last_use = last_use});
          }};
}

Buffer allocate_device(DeviceArena& arena, int64_t num_bytes) {
  std::shared_ptr<void> memory = arena.allocate(num_bytes);
  auto* data = static_cast<std::byte*>(memory.get());
  return {std::move(memory), data, num_bytes,
          Device{.kind = DeviceKind::kCuda, .index = arena.device()}};
}

}  // namespace crossdock::cuda
