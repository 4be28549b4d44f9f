#include "cli/run/values.hpp"

#include <cmath>

#include "bench/mix.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::cli {
namespace {

using bench::mix;

uint64_t key_of(uint64_t seed, Source source, int64_t index) {
  return mix(mix(mix(seed) + static_cast<uint64_t>(source)) + static_cast<uint64_t>(index));
}

// Uniform in [-scale, scale); exact in fp32 except for the rounding of the product.
float draw(uint64_t key, int64_t place, float scale) {
  const auto bits = static_cast<int32_t>(mix(key + static_cast<uint64_t>(place)) >> 40);
  return scale * (static_cast<float>(bits - (1 << 23)) * 0x1p-23f);
}

template <typename T>
T rounded(float value) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

template <typename T>
void fill_row(uint64_t key, float scale, T* row, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] = rounded<T>(draw(key, i, scale));
}

}  // namespace

RunValues::RunValues(const RunJob& job)
    : seed_(job.seed),
      width_(static_cast<double>(job.layer.router.width)),
      inner_(static_cast<double>(job.layer.experts.inner)),
      shared_inner_(static_cast<double>(job.layer.shared_inner)) {}

// Keeps the magnitude of activations and logits near 1 for all widths.
double RunValues::scale_of(Source source) const {
  switch (source) {
    case Source::kX:
    case Source::kGradOut:
      return std::sqrt(3.0);
    case Source::kGate:
    case Source::kW1:
    case Source::kSharedW1:
      return std::sqrt(3.0 / width_);
    case Source::kW2:
      return std::sqrt(3.0 / inner_);
    case Source::kSharedW2:
      return std::sqrt(3.0 / shared_inner_);
    default:
      return 0.125;
  }
}

void RunValues::fill(Source source, int64_t first, TensorView rows) const {
  const auto scale = static_cast<float>(scale_of(source));
  const int64_t count = rows.row_bytes() / size_of(rows.dtype);
  ThreadPool::process_wide()->parallel_for(rows.num_rows(), [&](int64_t i) {
    const uint64_t key = key_of(seed_, source, first + i);
    std::byte* row = static_cast<std::byte*>(rows.data) + i * rows.row_bytes();
    switch (rows.dtype) {
      case DType::kF64:
        return fill_row(key, scale, reinterpret_cast<double*>(row), count);
      case DType::kBF16:
        return fill_row(key, scale, reinterpret_cast<BF16*>(row), count);
      case DType::kF16:
        return fill_row(key, scale, reinterpret_cast<F16*>(row), count);
      default:
        return fill_row(key, scale, reinterpret_cast<float*>(row), count);
    }
  });
}

std::vector<double> RunValues::row(Source source, int64_t index, int64_t width, DType dtype) const {
  const Buffer buffer(width * size_of(dtype));
  const TensorView row = buffer.view(dtype, {1, width});
  fill(source, index, row);
  return reference::to_values(row);
}

}  // namespace crossdock::cli
