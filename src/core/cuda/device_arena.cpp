#include "core/cuda/device_arena.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
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

namespace {

constexpr int64_t kAlignment = 256;
// A chunk has at least kChunkBytes and at least 1 / kGrowth of the arena: there are never many
// chunks.
constexpr int64_t kChunkBytes = int64_t{64} << 20;
constexpr int64_t kGrowth = 8;

int64_t total_memory(int device) {
  const DeviceGuard guard(device);
  size_t free = 0;
  size_t total = 0;
  CROSSDOCK_CUDA(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(total);
}

}  // namespace

std::shared_ptr<RangeArena> RangeArena::make(int device, MemorySharing sharing) {
  return std::static_pointer_cast<RangeArena>(DeviceArena::make(device, sharing));
}

RangeArena::RangeArena(int device, MemorySharing sharing)
    : DeviceArena(device),
      sharing_(sharing),
      granularity_(memory_granularity(device, sharing)),
      range_(device, round_up(total_memory(device), granularity_)) {
  const CallGuard guard(device);
  grow(granularity_, granularity_);
}

std::vector<int64_t> RangeArena::chunks() const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> sizes;
  for (const PhysicalMemory& chunk : range_.chunks()) sizes.push_back(chunk.num_bytes());
  return sizes;
}

Descriptor RangeArena::export_descriptor(size_t chunk) const {
  const std::lock_guard lock(mutex_);
  return range_.chunks()[chunk].export_descriptor();
}

CUmemFabricHandle RangeArena::export_fabric(size_t chunk) const {
  const std::lock_guard lock(mutex_);
  return range_.chunks()[chunk].export_fabric();
}

MemoryBlock RangeArena::take(int64_t num_bytes) {
  const int64_t taken_bytes = round_up(num_bytes, kAlignment);
  const std::lock_guard lock(mutex_);
  std::erase_if(unused_, [&](const UnusedBlock& unused) {
    if (!unused.is_done()) return false;
    free_.give_back(unused.block.base - base(), unused.block.num_bytes);
    return true;
  });
  std::optional<int64_t> offset = free_.take(taken_bytes);
  if (!offset) {
    grow(taken_bytes - free_.bytes_before(range_.num_bytes()),
         std::max(kChunkBytes, range_.num_bytes() / kGrowth));
    offset = free_.take(taken_bytes);
  }
  return {.base = base() + *offset, .num_bytes = taken_bytes};
}

void RangeArena::give_back(const UnusedBlock& unused) {
  const std::lock_guard lock(mutex_);
  unused_.push_back(unused);
}

// Adds a chunk of ample size, or of the needed size if there is not enough memory for that.
void RangeArena::grow(int64_t needed_bytes, int64_t ample_bytes) {
  const int64_t end = range_.num_bytes();
  const int64_t left = range_.capacity() - end;
  const int64_t needed = round_up(needed_bytes, granularity_);
  const int64_t ample = std::min(round_up(std::max(needed, ample_bytes), granularity_), left);
  std::optional<PhysicalMemory> chunk;
  if (needed <= left) {
    chunk = PhysicalMemory::create(device(), ample, sharing_);
    if (!chunk) chunk = PhysicalMemory::create(device(), needed, sharing_);
  }
  if (!chunk) check(cudaErrorMemoryAllocation, "cuMemCreate");
  range_.append(std::move(*chunk));
  filled_bytes_ = range_.num_bytes();
  free_.give_back(end, num_bytes() - end);
}

}  // namespace crossdock::cuda
