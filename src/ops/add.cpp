#include "ops/add.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "ops/convert.hpp"

namespace crossdock::ops {
namespace {

constexpr int64_t kChunk = 16384;  // elements a thread adds at a time

template <typename T>
void add_typed(const AddArgs& args, ThreadPool& pool) {
  const int64_t count = args.sum.num_elements();
  const T* term = static_cast<const T*>(args.term.data);
  T* sum = static_cast<T*>(args.sum.data);
  pool.parallel_for((count + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t end = std::min(count, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < end; ++i) {
      sum[i] = narrow<T>(widen(sum[i]) + widen(term[i]));
    }
  });
}

}  // namespace

void add(const AddArgs& args, ThreadPool& pool) {
  CROSSDOCK_ASSERT(args.term.dtype == args.sum.dtype && args.term.shape == args.sum.shape);
  switch (args.sum.dtype) {
    case DType::kF64:
      return add_typed<double>(args, pool);
    case DType::kBF16:
      return add_typed<BF16>(args, pool);
    case DType::kF16:
      return add_typed<F16>(args, pool);
    default:
      return add_typed<float>(args, pool);
  }
}

}  // namespace crossdock::ops
