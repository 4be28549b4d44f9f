#include "ops/cuda/product_scratch.hpp"

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::ops {
namespace {

constexpr int64_t kCounterBytes = 256;

Buffer allocate_counters(cuda::DeviceArena& arena) {
  Buffer counters = cuda::allocate_device(arena, kCounterBytes);
  CROSSDOCK_CUDA(cudaMemsetAsync(counters.data(), 0, kCounterBytes, arena.stream()));
  CROSSDOCK_CUDA(cudaStreamSynchronize(arena.stream()));
  return counters;
}

}  // namespace

ProductScratch& ProductScratch::of(int device) {
  static auto* const kMutex = new std::mutex;
  static auto* const kAll = new std::map<int, std::unique_ptr<ProductScratch>>;
  const std::lock_guard lock(*kMutex);
  std::unique_ptr<ProductScratch>& scratch = (*kAll)[device];
  if (!scratch) scratch.reset(new ProductScratch(device));
  return *scratch;
}

ProductScratch::ProductScratch(int device)
    : arena_(cuda::DeviceArena::make(device, cuda::MemorySharing::kNone)) {}

ProductScratch::Memory ProductScratch::take(cudaStream_t stream, int64_t num_bytes) {
  const bool is_per_thread = stream == cudaStreamPerThread;
  const Key key(stream, cuda::capture_id(stream),
                is_per_thread ? std::this_thread::get_id() : std::thread::id());
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  if (entry.counters.num_bytes() == 0) entry.counters = allocate_counters(*arena_);
  if (num_bytes > 0 && (entry.bytes.empty() || entry.bytes.back().num_bytes() < num_bytes)) {
    entry.bytes.push_back(cuda::allocate_device(*arena_, num_bytes));
  }
  return {.counters = reinterpret_cast<int32_t*>(entry.counters.data()),
          .bytes = entry.bytes.empty() ? nullptr : entry.bytes.back().data()};
}

}  // namespace crossdock::ops
