#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_arena.hpp"
#include "core/cuda/stream.hpp"
#include "ops/cuda/grouped_product.hpp"
#include "ops/cuda/hopper/operands.hpp"
#include "ops/cuda/plain/products.hpp"

namespace crossdock::ops {

/// Device memory that product kernels use besides their tensors. Kernels that may run at the same
/// time use different memory: every stream has its own, and so does every captured graph, whose
/// replays may overlap with other work of the stream. Thread-safe.
///
/// It is never freed: kernels may still run when the object that launched them is gone.
class ProductScratch {
 public:
  /// The instance of a device, for all products of this process.
  static ProductScratch& of(int device);
  ProductScratch(const ProductScratch&) = delete;
  ProductScratch& operator=(const ProductScratch&) = delete;

  struct Memory {
    int32_t* counters;  // [2], zero; kernels leave them zero
    std::byte* bytes;   // unspecified contents, 256-byte aligned
  };
  /// Memory for the stream's next kernels, at least num_bytes bytes. Allocates when a stream or a
  /// capture is new or needs more than before; waits for the allocation, not for kernels.
  Memory take(cudaStream_t stream, int64_t num_bytes);

 private:
  explicit ProductScratch(int device);

  struct Entry {
    Buffer counters;
    std::vector<Buffer> bytes;  // the last one is in use; kernels in flight may use the others
  };
  // The last member distinguishes threads for cudaStreamPerThread.
  using Key = std::tuple<cudaStream_t, uint64_t, std::thread::id>;

  std::shared_ptr<cuda::DeviceArena> arena_;
  std::mutex mutex_;
  std::map<Key, Entry> entries_;
};

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

namespace {

int sms_of(Device device, int max_sms) {
  CROSSDOCK_CHECK(device.kind == DeviceKind::kCuda, "grouped products need a GPU");
  CROSSDOCK_CHECK(max_sms >= 0, "max_sms must not be negative, got ", max_sms);
  const int num_sms = cuda::num_sms(device.index);
  return max_sms > 0 ? std::min(max_sms, num_sms) : num_sms;
}

// The output of a product without rows or without experts.
void zero_all(const TensorView& out, Stream stream) {
  if (out.num_bytes() == 0) return;
  CROSSDOCK_CUDA(
      cudaMemsetAsync(out.data, 0, static_cast<size_t>(out.num_bytes()), cuda::handle_of(stream)));
}

}  // namespace

struct GroupedProducts::State {
  State(Device device_in, int max_sms, ProductKernels kernels)
      : device(device_in),
        num_sms(sms_of(device, max_sms)),
        scratch(ProductScratch::of(device.index)) {
    const cuda::CallGuard guard(device.index);
    plain::load_products();
    has_hopper_kernels = kernels == ProductKernels::kFastest && hopper::load_products();
  }

  /// zero_unused: whether the output becomes 0 where there is nothing to multiply.
  template <typename Args>
  void run(const Args& args, bool zero_unused, Stream stream) {
    const ProductSizes sizes = check_product(args, device);
    const cuda::CallGuard guard(device.index);
    if (sizes.R > 0 && sizes.E_local > 0) {
      launch(args, sizes, stream);
    } else if (zero_unused) {
      zero_all(args.out, stream);
    }
  }

  /// REQUIRES: checked arguments, and the device is current.
  template <typename Args>
  void launch(const Args& args, const ProductSizes& sizes, Stream stream) {
    const cudaStream_t handle = cuda::handle_of(stream);
    const int used_sms = std::max(1, num_sms - args.free_sms);
    if (!has_hopper_kernels || !hopper::takes(args, sizes)) {
      plain::launch_product(args, sizes, used_sms, handle);
      return;
    }
    const bool is_dw = std::is_same_v<Args, ProductDwArgs>;
    const auto memory = scratch.take(handle, is_dw ? hopper::dw_scratch_bytes(sizes.E_local) : 0);
    hopper::launch_product(args, sizes,
                           {.maps = tensor_maps,
                            .num_sms = used_sms,
                            .stream = handle,
                            .counters = memory.counters,
                            .dw_scratch = memory.bytes});
  }

  Device device;
  int num_sms;
  bool has_hopper_kernels = false;
  hopper::TensorMaps tensor_maps;
  ProductScratch& scratch;
};

GroupedProducts::GroupedProducts(Device device, int max_sms, ProductKernels kernels)
    : state_(std::make_unique<State>(device, max_sms, kernels)) {}
GroupedProducts::~GroupedProducts() = default;

void GroupedProducts::forward(const ProductForwardArgs& args, Stream stream) {
  state_->run(args, args.zero_unused_rows, stream);
}

void GroupedProducts::dx(const ProductDxArgs& args, Stream stream) {
  state_->run(args, args.zero_unused_rows, stream);
}

void GroupedProducts::dw(const ProductDwArgs& args, Stream stream) {
  state_->run(args, !args.accumulate, stream);
}

}  // namespace crossdock::ops
