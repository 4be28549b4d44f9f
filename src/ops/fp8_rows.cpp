#include "ops/fp8_rows.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <utility>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "core/text.hpp"
#include "ops/convert.hpp"
#include "ops/copy_rows.hpp"

namespace crossdock {
namespace {

using ops::GroupScale;

// ---- One group ----

// Integers of the element's size: a CPU compares more of them at a time than floats.
CROSSDOCK_INLINE uint32_t magnitude(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7fffffffu;
}
template <typename Half>
CROSSDOCK_INLINE uint16_t magnitude(Half x) {
  return x.bits & 0x7fffu;
}

CROSSDOCK_INLINE uint32_t float_bits(uint32_t magnitude, float /*type*/) {
  return magnitude;
}
template <typename Half>
CROSSDOCK_INLINE uint32_t float_bits(uint16_t magnitude, Half /*type*/) {
  return std::bit_cast<uint32_t>(to_float(Half{magnitude}));
}

template <typename Element>
CROSSDOCK_INLINE uint32_t amax_bits(const Element* x, int64_t count) {
  decltype(magnitude(*x)) most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, magnitude(x[i]));
  return float_bits(most, Element{});
}

template <typename Element>
CROSSDOCK_INLINE void round_values(const Element* x, int64_t count, float factor, F8E4M3* values) {
  for (int64_t i = 0; i < count; ++i) values[i] = to_f8e4m3(to_float(x[i]) * factor);
}

// A group with a NaN or an infinity.
template <typename Element>
void round_nonfinite(const Element* x, int64_t count, F8E4M3* values) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(x[i]);
    values[i] = std::isnan(value) ? F8E4M3{0x7f} : to_f8e4m3(value);
  }
}

template <typename Element>
CROSSDOCK_INLINE float quantise_group(const QuantiseRowsArgs& a, const Element* x, int64_t count,
                                      F8E4M3* values) {
  const uint32_t amax = amax_bits(x, count);
  const GroupScale group = ops::group_scale(amax, a.amax_floor, a.scale);
  if (amax < ops::kInfinityBits) {
    round_values(x, count, group.factor, values);
  } else {
    round_nonfinite(x, count, values);
  }
  return group.scale;
}

// ---- Rows ----

// Rows [first, last).
struct Rows {
  int64_t first;
  int64_t last;
};

template <typename Element, typename Scale, int64_t kGroup>
CROSSDOCK_INLINE void quantise_as(const QuantiseRowsArgs& a, const Rows& rows) {
  const int64_t D = a.x.shape[1];
  const int64_t num_scales = (D + kGroup - 1) / kGroup;
  for (int64_t t = rows.first; t < rows.last; ++t) {
    const Element* x = pointer<Element>(a.x) + t * D;
    F8E4M3* values = pointer<F8E4M3>(a.values) + t * D;
    Scale* scales = pointer<Scale>(a.scales) + t * num_scales;
    int64_t d = 0;
    for (; d + kGroup <= D; d += kGroup) {
      *scales++ = ops::stored_scale<Scale>(quantise_group(a, x + d, kGroup, values + d));
    }
    if (d < D) *scales = ops::stored_scale<Scale>(quantise_group(a, x + d, D - d, values + d));
  }
}

template <typename Element, typename Scale, int64_t kGroup>
CROSSDOCK_INLINE void dequantise_as(const DequantiseRowsArgs& a, const Rows& rows) {
  const int64_t D = a.values.shape[1];
  const int64_t num_scales = (D + kGroup - 1) / kGroup;
  for (int64_t r = rows.first; r < rows.last; ++r) {
    const F8E4M3* values = pointer<F8E4M3>(a.values) + r * D;
    const Scale* scales = pointer<Scale>(a.scales) + r * num_scales;
    Element* out = pointer<Element>(a.out) + r * D;
    for (int64_t first = 0; first < D; first += kGroup) {
      const float scale = to_float(*scales++);
      const int64_t last = std::min(first + kGroup, D);
      for (int64_t d = first; d < last; ++d) {
        out[d] = from_float<Element>(ops::scaled(values[d], scale));
      }
    }
  }
}

// One function per type, as CROSSDOCK_SIMD does not apply to templates.
CROSSDOCK_SIMD void quantise_f32_128(const QuantiseRowsArgs& a, const Rows& rows) {
  quantise_as<float, float, 128>(a, rows);
}
CROSSDOCK_SIMD void quantise_bf16_128(const QuantiseRowsArgs& a, const Rows& rows) {
  quantise_as<BF16, float, 128>(a, rows);
}
CROSSDOCK_SIMD void quantise_f16_128(const QuantiseRowsArgs& a, const Rows& rows) {
  quantise_as<F16, float, 128>(a, rows);
}
CROSSDOCK_SIMD void quantise_f32_32(const QuantiseRowsArgs& a, const Rows& rows) {
  quantise_as<float, E8M0, 32>(a, rows);
}
CROSSDOCK_SIMD void quantise_bf16_32(const QuantiseRowsArgs& a, const Rows& rows) {
  quantise_as<BF16, E8M0, 32>(a, rows);
}
CROSSDOCK_SIMD void quantise_f16_32(const QuantiseRowsArgs& a, const Rows& rows) {
  quantise_as<F16, E8M0, 32>(a, rows);
}
CROSSDOCK_SIMD void dequantise_f32_128(const DequantiseRowsArgs& a, const Rows& rows) {
  dequantise_as<float, float, 128>(a, rows);
}
CROSSDOCK_SIMD void dequantise_bf16_128(const DequantiseRowsArgs& a, const Rows& rows) {
  dequantise_as<BF16, float, 128>(a, rows);
}
CROSSDOCK_SIMD void dequantise_f16_128(const DequantiseRowsArgs& a, const Rows& rows) {
  dequantise_as<F16, float, 128>(a, rows);
}
CROSSDOCK_SIMD void dequantise_f32_32(const DequantiseRowsArgs& a, const Rows& rows) {
  dequantise_as<float, E8M0, 32>(a, rows);
}
CROSSDOCK_SIMD void dequantise_bf16_32(const DequantiseRowsArgs& a, const Rows& rows) {
  dequantise_as<BF16, E8M0, 32>(a, rows);
}
CROSSDOCK_SIMD void dequantise_f16_32(const DequantiseRowsArgs& a, const Rows& rows) {
  dequantise_as<F16, E8M0, 32>(a, rows);
}

template <typename Args>
using Loop = void (*)(const Args&, const Rows&);

// The choice by the dtype of the wide rows; {fp32, bf16, fp16}.
template <typename Args>
Loop<Args> choose(DType dtype, const std::array<Loop<Args>, 3>& loops) {
  return loops[dtype == DType::kF32 ? 0 : dtype == DType::kBF16 ? 1 : 2];
}

template <typename Args>
void run(const Args& args, const ConstTensorView& wide, Loop<Args> loop) {
  const auto pool = args.pool != nullptr ? nullptr : ThreadPool::process_wide();
  const int64_t row_bytes = wide.shape[1] * (size_of(wide.dtype) + 1);
  ops::for_row_blocks(args.pool != nullptr ? *args.pool : *pool, wide.shape[0], row_bytes,
                      [&](int64_t first, int64_t last) {
                        loop(args, {first, last});
                      });
}

// ---- Checks ----

// `values` and `scales`: the fp8 rows of `wide`.
struct Fp8Rows {
  ConstTensorView values;
  ConstTensorView scales;
  const char* wide_name;
  ConstTensorView wide;
};

void check(const Fp8Rows& rows) {
  const DType wide = rows.wide.dtype;
  CROSSDOCK_CHECK(wide == DType::kF32 || wide == DType::kBF16 || wide == DType::kF16,
                  rows.wide_name, " must be fp32, bf16 or fp16, got ", name_of(wide));
  CROSSDOCK_CHECK(rows.wide.shape.rank() == 2, rows.wide_name, " must have 2 dimensions, got ",
                  rows.wide.shape.to_string());
  const Shape& shape = rows.wide.shape;
  CROSSDOCK_CHECK(shape[1] <= kMaxWidth, rows.wide_name, " must have at most ", kMaxWidth,
                  " values per row, got ", shape[1]);
  const Device device = rows.wide.device;
  const int64_t group = fp8_group_size(rows.scales.dtype);
  const Shape scales{shape[0], (shape[1] + group - 1) / group};
  check_memory(rows.wide_name, rows.wide, device);
  check_tensor("values", rows.values, device, DType::kF8E4M3, shape);
  check_tensor("scales", rows.scales, device, rows.scales.dtype, scales);
}

constexpr std::array<std::pair<Fp8Scale, std::string_view>, 2> kScaleNames = {
    {{Fp8Scale::kPow2, "pow2"}, {Fp8Scale::kExact, "exact"}}};

}  // namespace

#if !CROSSDOCK_HAS_CUDA
void ops::quantise_rows_on_device(const QuantiseRowsArgs& /*args*/) {
  throw Error(ErrorCode::kUnsupported, "this build has no CUDA, and the rows are on a GPU");
}
void ops::dequantise_rows_on_device(const DequantiseRowsArgs& /*args*/) {
  throw Error(ErrorCode::kUnsupported, "this build has no CUDA, and the rows are on a GPU");
}
#endif

std::string_view name_of(Fp8Scale scale) noexcept {
  return kScaleNames[static_cast<size_t>(scale)].second;
}

Fp8Scale parse_fp8_scale(std::string_view name) {
  using Named = std::pair<Fp8Scale, std::string_view>;
  return kScaleNames[index_of_name("scale", name, kScaleNames, &Named::second)].first;
}

int64_t fp8_group_size(DType scale_dtype) {
  CROSSDOCK_CHECK(scale_dtype == DType::kF32 || scale_dtype == DType::kE8M0,
                  "scales of fp8 must be fp32 (one per 128 values) or e8m0 (one per 32), got ",
                  name_of(scale_dtype));
  return scale_dtype == DType::kF32 ? 128 : 32;
}

void quantise_rows(const QuantiseRowsArgs& a) {
  check({.values = a.values, .scales = a.scales, .wide_name = "x", .wide = a.x});
  const bool has_floats = a.scales.dtype == DType::kF32;
  CROSSDOCK_CHECK(a.scale == Fp8Scale::kPow2 || (a.scale == Fp8Scale::kExact && has_floats),
                  "e8m0 scales are powers of two: with them, scale must be \"pow2\"");
  CROSSDOCK_CHECK(std::isfinite(a.amax_floor) && a.amax_floor >= 0.0f,
                  "amax_floor must be finite and not negative, got ", a.amax_floor);
  check_no_overlap({{"values", a.values}, {"scales", a.scales}}, {{"x", a.x}});
  if (a.x.num_elements() == 0) return;
  if (!a.x.device.is_cpu()) return ops::quantise_rows_on_device(a);
  run(a, a.x,
      has_floats ? choose<QuantiseRowsArgs>(a.x.dtype,
                                            {quantise_f32_128, quantise_bf16_128, quantise_f16_128})
                 : choose<QuantiseRowsArgs>(a.x.dtype,
                                            {quantise_f32_32, quantise_bf16_32, quantise_f16_32}));
}

void dequantise_rows(const DequantiseRowsArgs& a) {
  check({.values = a.values, .scales = a.scales, .wide_name = "out", .wide = a.out});
  check_no_overlap({{"out", a.out}}, {{"values", a.values}, {"scales", a.scales}});
  if (a.out.num_elements() == 0) return;
  if (!a.out.device.is_cpu()) return ops::dequantise_rows_on_device(a);
  run(a, a.out,
      a.scales.dtype == DType::kF32
          ? choose<DequantiseRowsArgs>(
                a.out.dtype, {dequantise_f32_128, dequantise_bf16_128, dequantise_f16_128})
          : choose<DequantiseRowsArgs>(a.out.dtype,
                                       {dequantise_f32_32, dequantise_bf16_32, dequantise_f16_32}));
}

}  // namespace crossdock
