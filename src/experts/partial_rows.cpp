#include "experts/partial_rows.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "ops/convert.hpp"
#include "ops/cuda/device_rows.hpp"

namespace crossdock {
namespace {

constexpr int64_t kChunk = 16384;  // elements that a thread rounds at a time

template <typename T>
void round_typed(const ConstTensorView& sums, const TensorView& out, ThreadPool& pool) {
  const int64_t count = out.num_elements();
  pool.parallel_for((count + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t first = chunk * kChunk;
    ops::narrow_row(pointer<float>(sums) + first, std::min(kChunk, count - first),
                    pointer<T>(out) + first);
  });
}

}  // namespace

void round_sums(const ConstTensorView& sums, const TensorView& out, ThreadPool& pool,
                Stream stream) {
  CROSSDOCK_ASSERT(sums.dtype == DType::kF32 && sums.shape == out.shape);
  if (!out.device.is_cpu()) return ops::round_on_device(sums, out, stream);
  if (out.dtype == DType::kBF16) return round_typed<BF16>(sums, out, pool);
  CROSSDOCK_ASSERT(out.dtype == DType::kF16);
  round_typed<F16>(sums, out, pool);
}

}  // namespace crossdock
