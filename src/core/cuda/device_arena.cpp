#include "core/cuda/device_arena.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/tensor_memory.hpp"

namespace crossdock::cuda {
namespace {

CUmemAllocationHandleType handle_type(MemorySharing sharing) {
  CROSSDOCK_ASSERT(sharing == MemorySharing::kDescriptors || sharing == MemorySharing::kFabric);
  return sharing == MemorySharing::kFabric ? CU_MEM_HANDLE_TYPE_FABRIC
                                           : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemAllocationProp properties(int device, MemorySharing sharing) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = handle_type(sharing);
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  return wanted;
}

void export_handle(const PhysicalMemory& memory, CUmemAllocationHandleType type, void* exported) {
  static const auto kExport = driver_function<PFN_cuMemExportToShareableHandle_v10020>(
      "cuMemExportToShareableHandle", 10020);
  CROSSDOCK_CUDA(kExport(exported, memory.handle(), type, 0));
}

CUmemGenericAllocationHandle import_handle(void* exported, CUmemAllocationHandleType type) {
  static const auto kImport = driver_function<PFN_cuMemImportFromShareableHandle_v10020>(
      "cuMemImportFromShareableHandle", 10020);
  CUmemGenericAllocationHandle handle = 0;
  CROSSDOCK_CUDA(kImport(&handle, exported, type));
  return handle;
}

bool has_attribute(int device, CUdevice_attribute attribute) {
  static const auto kGet =
      driver_function<PFN_cuDeviceGetAttribute_v2000>("cuDeviceGetAttribute", 2000);
  int value = 0;
  // A driver that does not know the attribute does not have the feature.
  return kGet(&value, attribute, device) == CUDA_SUCCESS && value != 0;
}

}  // namespace

std::optional<PhysicalMemory> PhysicalMemory::create(int device, int64_t num_bytes,
                                                     MemorySharing sharing) {
  static const auto kCreate = driver_function<PFN_cuMemCreate_v10020>("cuMemCreate", 10020);
  const CUmemAllocationProp wanted = properties(device, sharing);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status = kCreate(&handle, static_cast<size_t>(num_bytes), &wanted, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return std::nullopt;
  check(status, "cuMemCreate");
  return PhysicalMemory(handle, num_bytes);
}

PhysicalMemory PhysicalMemory::import_descriptor(const Descriptor& exported, int64_t num_bytes) {
  const auto value = static_cast<intptr_t>(exported.number());
  auto* const number = reinterpret_cast<void*>(value);  // NOLINT: as the driver takes it
  return {import_handle(number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), num_bytes};
}

PhysicalMemory PhysicalMemory::import_fabric(const CUmemFabricHandle& exported, int64_t num_bytes) {
  CUmemFabricHandle handle = exported;
  return {import_handle(&handle, CU_MEM_HANDLE_TYPE_FABRIC), num_bytes};
}

PhysicalMemory::PhysicalMemory(PhysicalMemory&& other) noexcept
    : handle_(std::exchange(other.handle_, 0)), num_bytes_(other.num_bytes_) {}

PhysicalMemory& PhysicalMemory::operator=(PhysicalMemory&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

PhysicalMemory::~PhysicalMemory() {
  if (handle_ == 0) return;
  static const auto kRelease = driver_function<PFN_cuMemRelease_v10020>("cuMemRelease", 10020);
  kRelease(handle_);
}

Descriptor PhysicalMemory::export_descriptor() const {
  int number = -1;
  export_handle(*this, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, &number);
  return Descriptor(number);
}

CUmemFabricHandle PhysicalMemory::export_fabric() const {
  CUmemFabricHandle exported{};
  export_handle(*this, CU_MEM_HANDLE_TYPE_FABRIC, &exported);
  return exported;
}

int64_t memory_granularity(int device, MemorySharing sharing) {
  static const auto kGet = driver_function<PFN_cuMemGetAllocationGranularity_v10020>(
      "cuMemGetAllocationGranularity", 10020);
  const CUmemAllocationProp wanted = properties(device, sharing);
  size_t granularity = 0;
  CROSSDOCK_CUDA(kGet(&granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  return static_cast<int64_t>(granularity);
}

void check_sharing(int device, MemorySharing sharing) {
  const bool is_fabric = sharing == MemorySharing::kFabric;
  const char* name = is_fabric ? "fabric handles" : "file descriptors";
  const CUdevice_attribute wanted =
      is_fabric ? CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
                : CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
  if (!has_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) ||
      !has_attribute(device, wanted)) {
    throw Error(ErrorCode::kUnsupported,
                concat("GPU ", device, " or its driver cannot share memory by ", name));
  }
  try {  // fabric handles also need a fabric channel; only an attempt shows whether there is one
    const std::optional<PhysicalMemory> memory =
        PhysicalMemory::create(device, memory_granularity(device, sharing), sharing);
    if (memory && is_fabric) memory->export_fabric();
    if (memory && !is_fabric) memory->export_descriptor();
  } catch (const Error& error) {
    throw Error(ErrorCode::kUnsupported,
                concat("GPU ", device, " cannot share memory by ", name, ": ", error.what()));
  }
}

namespace {

CUdeviceptr address_of(const std::byte* data) {
  return reinterpret_cast<CUdeviceptr>(data);
}

void unmap(const std::byte* data, int64_t num_bytes) {
  static const auto kUnmap = driver_function<PFN_cuMemUnmap_v10020>("cuMemUnmap", 10020);
  kUnmap(address_of(data), static_cast<size_t>(num_bytes));
}

}  // namespace

MappedRange::MappedRange(int device, int64_t capacity) : device_(device), capacity_(capacity) {
  static const auto kReserve =
      driver_function<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve", 10020);
  CUdeviceptr base = 0;
  CROSSDOCK_CUDA(kReserve(&base, static_cast<size_t>(capacity), 0, 0, 0));
  base_ = reinterpret_cast<std::byte*>(base);  // NOLINT: the driver's type for addresses
}

MappedRange::~MappedRange() {
  static const auto kFree = driver_function<PFN_cuMemAddressFree_v10020>("cuMemAddressFree", 10020);
  const DeviceGuard guard(device_, std::nothrow);
  const RelaxedCapture relaxed;
  int64_t offset = 0;
  for (const PhysicalMemory& chunk : chunks_) {
    unmap(base_ + offset, chunk.num_bytes());
    offset += chunk.num_bytes();
  }
  kFree(address_of(base_), static_cast<size_t>(capacity_));
}

void MappedRange::append(PhysicalMemory memory) {
  static const auto kMap = driver_function<PFN_cuMemMap_v10020>("cuMemMap", 10020);
  static const auto kSetAccess =
      driver_function<PFN_cuMemSetAccess_v10020>("cuMemSetAccess", 10020);
  const int64_t added = memory.num_bytes();
  CROSSDOCK_ASSERT(num_bytes_ + added <= capacity_);
  const CUdeviceptr end = address_of(base_ + num_bytes_);
  chunks_.reserve(chunks_.size() + 1);
  CROSSDOCK_CUDA(kMap(end, static_cast<size_t>(added), 0, memory.handle(), 0));
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device_;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult status = kSetAccess(end, static_cast<size_t>(added), &access, 1);
  if (status != CUDA_SUCCESS) {
    unmap(base_ + num_bytes_, added);
    check(status, "cuMemSetAccess");
  }
  chunks_.push_back(std::move(memory));
  num_bytes_ += added;
}

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
