#include "ops/sum_rows.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/check.hpp"
#include "core/stream_copy.hpp"
#include "ops/convert.hpp"
#include "ops/copy_rows.hpp"

namespace crossdock::ops {
namespace {

// Values of a sum that are computed together; they fit in the registers of every instruction set.
constexpr int64_t kTile = 64;

// Lanes of a dot product: lane l sums the values l, l + kLanes, ...; then the lanes are added in
// halves. The bits of the result depend on this number.
constexpr int kLanes = 32;

template <typename Acc, typename In>
CROSSDOCK_INLINE Acc widen(In value) {
  if constexpr (std::is_same_v<In, Acc>) {
    return value;
  } else {
    return to_float(value);
  }
}

template <typename Out, typename Acc>
CROSSDOCK_INLINE Out narrow(Acc value) {
  if constexpr (std::is_same_v<Out, Acc>) {
    return value;
  } else {
    return from_float<Out>(value);
  }
}

// One tile of one sum. The inner loop is over the rows: the sum stays in registers, and all rows
// are read at the same time, which is twice as fast as reading them one after another.
template <typename In, typename Acc>
CROSSDOCK_INLINE void sum_tile(const SumRowsArgs& a, int64_t begin, int64_t end, int64_t first,
                               Acc* __restrict sum, int64_t width) {
  const auto* weights = static_cast<const Acc*>(a.weights);
  for (int64_t i = 0; i < width; ++i) sum[i] = Acc{0};
  for (int64_t j = begin; j < end; ++j) {
    if (a.rows[j] == nullptr) continue;
    const Acc weight = weights != nullptr ? weights[j] : Acc{1};
    const In* __restrict row = reinterpret_cast<const In*>(a.rows[j]) + first;
    for (int64_t i = 0; i < width; ++i) sum[i] = std::fma(weight, widen<Acc>(row[i]), sum[i]);
  }
}

template <typename Out, typename Acc>
CROSSDOCK_INLINE void store_tile(const Acc* __restrict sum, Out* out, int64_t width,
                                 Stores stores) {
  if constexpr (std::is_same_v<Out, Acc>) {
    copy_bytes(reinterpret_cast<std::byte*>(out), reinterpret_cast<const std::byte*>(sum),
               width * static_cast<int64_t>(sizeof(Out)), stores);
  } else {
    Out rounded[kTile];
    for (int64_t i = 0; i < width; ++i) rounded[i] = narrow<Out>(sum[i]);
    copy_bytes(reinterpret_cast<std::byte*>(out), reinterpret_cast<const std::byte*>(rounded),
               width * static_cast<int64_t>(sizeof(Out)), stores);
  }
}

template <typename In, typename Acc, typename Out>
CROSSDOCK_INLINE void sum_rows_as(const SumRowsArgs& a, Stores stores) {
  for (int64_t n = 0; n < a.N; ++n) {
    const int64_t begin = a.offsets != nullptr ? a.offsets[n] : n * a.K;
    const int64_t end = a.offsets != nullptr ? a.offsets[n + 1] : begin + a.K;
    Out* out = reinterpret_cast<Out*>(a.out) + n * a.D;
    int64_t first = 0;
    for (; first + kTile <= a.D; first += kTile) {
      alignas(64) Acc sum[kTile];
      sum_tile<In, Acc>(a, begin, end, first, sum, kTile);
      store_tile(sum, out + first, kTile, stores);
    }
    if (first < a.D) {
      alignas(64) Acc sum[kTile];
      sum_tile<In, Acc>(a, begin, end, first, sum, a.D - first);
      store_tile(sum, out + first, a.D - first, stores);
    }
  }
  finish_stores();
}

CROSSDOCK_SIMD void sum_f64(const SumRowsArgs& a, Stores stores) {
  sum_rows_as<double, double, double>(a, stores);
}
CROSSDOCK_SIMD void sum_f32(const SumRowsArgs& a, Stores stores) {
  sum_rows_as<float, float, float>(a, stores);
}
CROSSDOCK_SIMD void sum_bf16(const SumRowsArgs& a, Stores stores) {
  sum_rows_as<BF16, float, BF16>(a, stores);
}
CROSSDOCK_SIMD void sum_f16(const SumRowsArgs& a, Stores stores) {
  sum_rows_as<F16, float, F16>(a, stores);
}
CROSSDOCK_SIMD void sum_bf16_f32(const SumRowsArgs& a, Stores stores) {
  sum_rows_as<BF16, float, float>(a, stores);
}
CROSSDOCK_SIMD void sum_f16_f32(const SumRowsArgs& a, Stores stores) {
  sum_rows_as<F16, float, float>(a, stores);
}
CROSSDOCK_SIMD void sum_f32_bf16(const SumRowsArgs& a, Stores stores) {
  sum_rows_as<float, float, BF16>(a, stores);
}
CROSSDOCK_SIMD void sum_f32_f16(const SumRowsArgs& a, Stores stores) {
  sum_rows_as<float, float, F16>(a, stores);
}

template <typename In, typename Acc>
CROSSDOCK_INLINE Acc dot(const In* __restrict a, const In* __restrict b, int64_t D) {
  Acc lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= D; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      lanes[l] = std::fma(widen<Acc>(a[i + l]), widen<Acc>(b[i + l]), lanes[l]);
    }
  }
  for (int l = 0; i + l < D; ++l) {
    lanes[l] = std::fma(widen<Acc>(a[i + l]), widen<Acc>(b[i + l]), lanes[l]);
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

template <typename In, typename Acc>
CROSSDOCK_INLINE void backward_as(const SumRowsBackwardArgs& a) {
  const auto* weights = static_cast<const Acc*>(a.weights);
  auto* grad_weights = static_cast<Acc*>(a.grad_weights);
  for (int64_t r = 0; r < a.R; ++r) {
    const In* y = reinterpret_cast<const In*>(a.y) + r * a.D;
    In* grad = reinterpret_cast<In*>(a.grad) + r * a.D;
    grad_weights[r] = dot<In, Acc>(y, grad, a.D);
    const Acc weight = weights[r];
    for (int64_t i = 0; i < a.D; ++i) grad[i] = narrow<In>(weight * widen<Acc>(grad[i]));
  }
}

CROSSDOCK_SIMD void backward_f64(const SumRowsBackwardArgs& a) {
  backward_as<double, double>(a);
}
CROSSDOCK_SIMD void backward_f32(const SumRowsBackwardArgs& a) {
  backward_as<float, float>(a);
}
CROSSDOCK_SIMD void backward_bf16(const SumRowsBackwardArgs& a) {
  backward_as<BF16, float>(a);
}
CROSSDOCK_SIMD void backward_f16(const SumRowsBackwardArgs& a) {
  backward_as<F16, float>(a);
}

[[noreturn]] void throw_not_summable(DType from, DType to) {
  throw Error(ErrorCode::kInternal,
              concat("rows of ", name_of(from), " cannot be summed into ", name_of(to)));
}

void sum_block(const SumRowsArgs& a, Stores stores) {
  const auto is = [&a](DType from, DType to) { return a.row_dtype == from && a.out_dtype == to; };
  if (is(DType::kF64, DType::kF64)) return sum_f64(a, stores);
  if (is(DType::kF32, DType::kF32)) return sum_f32(a, stores);
  if (is(DType::kBF16, DType::kBF16)) return sum_bf16(a, stores);
  if (is(DType::kF16, DType::kF16)) return sum_f16(a, stores);
  if (is(DType::kBF16, DType::kF32)) return sum_bf16_f32(a, stores);
  if (is(DType::kF16, DType::kF32)) return sum_f16_f32(a, stores);
  if (is(DType::kF32, DType::kBF16)) return sum_f32_bf16(a, stores);
  if (is(DType::kF32, DType::kF16)) return sum_f32_f16(a, stores);
  throw_not_summable(a.row_dtype, a.out_dtype);
}

void backward_block(const SumRowsBackwardArgs& a) {
  switch (a.dtype) {
    case DType::kF64:
      return backward_f64(a);
    case DType::kF32:
      return backward_f32(a);
    case DType::kBF16:
      return backward_bf16(a);
    case DType::kF16:
      return backward_f16(a);
    default:
      throw_not_summable(a.dtype, a.dtype);
  }
}

// Rows [first, ..) of an array; null stays null.
template <typename Byte>
Byte* rows_from(Byte* data, int64_t first, int64_t row_bytes) {
  return data != nullptr ? data + first * row_bytes : nullptr;
}

}  // namespace

void sum_rows(const SumRowsArgs& a, ThreadPool& pool) {
  const int64_t out_bytes = a.D * size_of(a.out_dtype);
  const int64_t num_rows = a.offsets != nullptr && a.N > 0 ? a.offsets[a.N] : a.N * a.K;
  const int64_t bytes = num_rows * a.D * size_of(a.row_dtype) + a.N * out_bytes;
  const int64_t weight_bytes = a.row_dtype == DType::kF64 ? 8 : 4;
  const Stores stores = stores_for(a.N * out_bytes);
  for_row_blocks(pool, a.N, bytes / std::max<int64_t>(1, a.N), [&](int64_t first, int64_t last) {
    SumRowsArgs block = a;
    const int64_t skipped = a.offsets != nullptr ? 0 : first * a.K;
    if (a.offsets != nullptr) block.offsets += first;
    block.rows += skipped;
    block.weights = rows_from(static_cast<const std::byte*>(a.weights), skipped, weight_bytes);
    block.out += first * out_bytes;
    block.N = last - first;
    sum_block(block, stores);
  });
}

void sum_rows_backward(const SumRowsBackwardArgs& a, ThreadPool& pool) {
  const int64_t row_bytes = a.D * size_of(a.dtype);
  const int64_t weight_bytes = a.dtype == DType::kF64 ? 8 : 4;
  for_row_blocks(pool, a.R, 3 * row_bytes, [&](int64_t first, int64_t last) {
    SumRowsBackwardArgs block = a;
    block.y += first * row_bytes;
    block.grad += first * row_bytes;
    block.weights = static_cast<const std::byte*>(a.weights) + first * weight_bytes;
    block.grad_weights = static_cast<std::byte*>(a.grad_weights) + first * weight_bytes;
    block.R = last - first;
    backward_block(block);
  });
}

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
      sum[i] = narrow<T>(widen<Compute<T>>(sum[i]) + widen<Compute<T>>(term[i]));
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
