#include "core/cuda/device_arena.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

// Allocations of a multiple of this size are not parts of larger ones inside the driver, so that
// another process can map each by itself.
constexpr int64_t kExportUnit = int64_t{2} << 20;

cudaMemLocation on_device(int device) {
  cudaMemLocation location{};
  location.type = cudaMemLocationTypeDevice;
  location.id = device;
  return location;
}

// Free memory that a pool keeps instead of giving it back to the driver. It begins with as much.
constexpr uint64_t kKeptBytes = uint64_t{64} << 20;

cudaMemPool_t make_pool(int device) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = on_device(device);
  cudaMemPool_t pool = nullptr;
  CROSSDOCK_CUDA(cudaMemPoolCreate(&pool, &properties));
  uint64_t kept = kKeptBytes;
  CROSSDOCK_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
  int waits = 0;  // an allocation must not make its stream wait for what was freed
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

// Small allocations then do not make the pool grow while kernels wait for each other. Where there
// is no room for it, allocations will tell.
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
  if (is_exported) return std::shared_ptr<DeviceArena>(new DeviceArena(device, true));
  // Never destroyed: memory may outlive static objects.
  static auto* mutex = new std::mutex;
  static auto* arenas = new std::map<int, std::shared_ptr<DeviceArena>>;
  const std::lock_guard lock(*mutex);
  std::shared_ptr<DeviceArena>& arena = (*arenas)[device];
  if (!arena) arena.reset(new DeviceArena(device, false));
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
  void* memory = nullptr;
  if (is_exported_) {
    const int64_t rounded = (num_bytes + kExportUnit - 1) / kExportUnit * kExportUnit;
    CROSSDOCK_CUDA(cudaMalloc(&memory, static_cast<size_t>(rounded)));
  } else {
    free_unused();
    CROSSDOCK_CUDA(
        cudaMallocFromPoolAsync(&memory, static_cast<size_t>(num_bytes), pool_, stream()));
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream()));
  }
  return {memory, [self = shared_from_this(), last_use = std::move(last_use)](void* pointer) {
            self->free(pointer, last_use);
          }};
}

void DeviceArena::free(void* memory, const std::shared_ptr<OwnedEvent>& last_use) {
  if (is_exported_) {
    const RelaxedCapture relaxed;
    cudaFree(memory);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    unused_.push_back({.memory = memory, .last_use = last_use});
  }
  free_unused();
}

void DeviceArena::free_unused() {
  const RelaxedCapture relaxed;
  const std::lock_guard lock(mutex_);
  std::erase_if(unused_, [&](const Unused& block) {
    if (block.last_use && !block.last_use->has_passed()) return false;
    cudaFreeAsync(block.memory, stream());
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
