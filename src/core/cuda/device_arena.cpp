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

// Free memory that a pool keeps instead of giving it back to the driver.
constexpr uint64_t kKeptBytes = uint64_t{64} << 20;

cudaMemPool_t make_pool(int device) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = on_device(device);
  cudaMemPool_t pool = nullptr;
  CROSSDOCK_CUDA(cudaMemPoolCreate(&pool, &properties));
  uint64_t kept = kKeptBytes;
  CROSSDOCK_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
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

// One pool of a device serves all arenas of the process: a pool costs tens of megabytes. Never
// destroyed, as memory of it may outlive static objects.
cudaMemPool_t shared_pool(int device) {
  static auto* const mutex = new std::mutex;
  static auto* const pools = new std::map<int, cudaMemPool_t>;
  const std::lock_guard lock(*mutex);
  const auto found = pools->find(device);
  if (found != pools->end()) return found->second;
  return pools->emplace(device, make_pool(device)).first->second;
}

}  // namespace

std::shared_ptr<DeviceArena> DeviceArena::make(int device, bool is_exported) {
  return std::shared_ptr<DeviceArena>(new DeviceArena(device, is_exported));
}

DeviceArena::DeviceArena(int device, bool is_exported)
    : device_(device), is_exported_(is_exported), stream_(device) {
  if (!is_exported_) pool_ = shared_pool(device);
}

std::shared_ptr<void> DeviceArena::allocate(int64_t num_bytes,
                                            std::shared_ptr<OwnedEvent> last_use) {
  CROSSDOCK_CHECK(num_bytes > 0, "an allocation must have a size, got ", num_bytes);
  const DeviceGuard guard(device_);
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  if (is_exported_) {
    const int64_t rounded = (num_bytes + kExportUnit - 1) / kExportUnit * kExportUnit;
    CROSSDOCK_CUDA(cudaMalloc(&memory, static_cast<size_t>(rounded)));
  } else {
    CROSSDOCK_CUDA(
        cudaMallocFromPoolAsync(&memory, static_cast<size_t>(num_bytes), pool_, stream()));
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream()));
  }
  return {memory, [self = shared_from_this(), last_use = std::move(last_use)](void* pointer) {
            self->free(pointer, last_use.get());
          }};
}

void DeviceArena::free(void* memory, const OwnedEvent* last_use) {
  if (is_exported_) {
    cudaFree(memory);
    return;
  }
  if (last_use != nullptr) cudaStreamWaitEvent(stream(), last_use->get(), 0);
  cudaFreeAsync(memory, stream());
}

Buffer allocate_device(DeviceArena& arena, int64_t num_bytes) {
  std::shared_ptr<void> memory = arena.allocate(num_bytes);
  auto* data = static_cast<std::byte*>(memory.get());
  return {std::move(memory), data, num_bytes,
          Device{.kind = DeviceKind::kCuda, .index = arena.device()}};
}

}  // namespace crossdock::cuda
