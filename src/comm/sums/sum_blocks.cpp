#include "comm/sums/sum_blocks.hpp"

#include <algorithm>
#include <array>
#include <type_traits>

#include "core/check.hpp"

namespace crossdock::comm {
namespace {

// Type of the sums over values of type T. Unsigned: int64 sums wrap around.
template <typename T>
struct SumType {
  using Type = float;
};
template <>
struct SumType<double> {
  using Type = double;
};
template <>
struct SumType<int64_t> {
  using Type = uint64_t;
};

template <typename T>
typename SumType<T>::Type widened(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return static_cast<uint64_t>(value);
  } else {
    return to_float(value);
  }
}

template <typename T>
T narrowed(typename SumType<T>::Type sum) {
  if constexpr (std::is_same_v<T, double>) {
    return sum;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return static_cast<int64_t>(sum);
  } else {
    return from_float<T>(sum);
  }
}

template <typename T>
void sum_typed(const SumBlocksArgs& args) {
  constexpr int64_t kPiece = 512;  // elements whose sums stay in the cache
  std::array<typename SumType<T>::Type, kPiece> sums;
  const auto* blocks = reinterpret_cast<const T*>(args.blocks);
  auto* out = reinterpret_cast<T*>(args.out);
  for (int64_t begin = 0; begin < args.count; begin += kPiece) {
    const auto count = static_cast<size_t>(std::min(kPiece, args.count - begin));
    for (size_t i = 0; i < count; ++i) sums[i] = widened(blocks[begin + static_cast<int64_t>(i)]);
    for (int b = 1; b < args.num_blocks; ++b) {
      const T* block = blocks + b * args.count + begin;
      for (size_t i = 0; i < count; ++i) sums[i] += widened(block[i]);
    }
    for (size_t i = 0; i < count; ++i) out[begin + static_cast<int64_t>(i)] = narrowed<T>(sums[i]);
  }
}

}  // namespace

bool can_sum(DType dtype) {
  return is_summable(dtype) || dtype == DType::kI64;
}

void sum_blocks(DType dtype, const SumBlocksArgs& args) {
  switch (dtype) {
    case DType::kF64:
      return sum_typed<double>(args);
    case DType::kF32:
      return sum_typed<float>(args);
    case DType::kBF16:
      return sum_typed<BF16>(args);
    case DType::kF16:
      return sum_typed<F16>(args);
    case DType::kI64:
      return sum_typed<int64_t>(args);
    default:
      CROSSDOCK_ASSERT(can_sum(dtype));
  }
}

}  // namespace crossdock::comm
