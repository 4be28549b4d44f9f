#include "core/cuda/range_arena.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/sizes.hpp"

namespace crossdock::cuda {
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
