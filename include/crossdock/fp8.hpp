#pragma once

#include <cstdint>
#include <string_view>

#include "crossdock/dtype.hpp"
#include "crossdock/error.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

// Rows in fp8 e4m3 with scales, half the bytes of bf16: quantise_rows before a dispatch with
// DispatchArgs::scales, dequantise_rows after it. A row's values and scales depend on that row
// alone. CPU and GPU give the same bits.

namespace crossdock {

/// How the scale of a group follows from amax, the largest magnitude in it.
enum class Fp8Scale : uint8_t {
  kPow2,  // the smallest power of two that is at least amax / 448: multiplying by it rounds nothing
  kExact  // amax / 448, as DeepEP's per_token_cast_to_fp8; fp32 scales only
};

/// "pow2" or "exact".
CROSSDOCK_API std::string_view name_of(Fp8Scale scale) noexcept;
/// The inverse of name_of. Throws Error(kInvalidArgument), listing the valid names.
CROSSDOCK_API Fp8Scale parse_fp8_scale(std::string_view name);

/// Rounds rows to fp8 e4m3. Groups are contiguous values of a row, from its first one; the last
/// group of a row may be shorter. For each group, in fp32:
///
///   amax = the largest |x|;  a = max(amax, amax_floor);  if a is 0: scale = 1, factor = 1
///   kPow2:  scale = the smallest power of two >= a / 448, at least 2^-126;  factor = 1 / scale
///   kExact: a = max(a, 448 * 2^-126);  scale = a / 448;  factor = (1 / a) * 448
///   value = e4m3(x * factor): to nearest even, denormals kept, saturating at 448
///
/// Each operation is rounded once. If a group holds a NaN or an infinity, its scale is NaN (0xff in
/// e8m0) and its values are rounded as with scale 1: a NaN becomes 0x7f, an infinity +-448.
struct QuantiseRowsArgs {
  ConstTensorView x{};  // [T, D] fp32, bf16 or fp16
  TensorView values{};  // out: [T, D] fp8 e4m3
  TensorView scales{};  // out: [T, ceil(D/128)] fp32, or [T, ceil(D/32)] e8m0 (MXFP8)
  Fp8Scale scale = Fp8Scale::kPow2;
  float amax_floor = 0.0f;     // finite, not negative
  ThreadPool* pool = nullptr;  // for tensors in host memory; null: ThreadPool::process_wide()
  Stream stream{};             // for tensors on a GPU; all three must be on one device
};

/// The outputs must not overlap x or each other.
CROSSDOCK_API void quantise_rows(const QuantiseRowsArgs& args);

/// The inverse, up to rounding: out[r, d] = round(values[r, d] * scale of d's group in row r), the
/// product in fp32. A NaN becomes the positive quiet NaN without payload.
struct DequantiseRowsArgs {
  ConstTensorView values{};    // [R, D] fp8 e4m3
  ConstTensorView scales{};    // [R, ceil(D/128)] fp32, or [R, ceil(D/32)] e8m0
  TensorView out{};            // [R, D] fp32, bf16 or fp16
  ThreadPool* pool = nullptr;  // as above
  Stream stream{};
};

/// `out` must not overlap the inputs.
CROSSDOCK_API void dequantise_rows(const DequantiseRowsArgs& args);

/// Number of values that share a scale: 128 with fp32 scales, 32 with e8m0.
/// Throws Error(kInvalidArgument) for other dtypes.
[[nodiscard]] CROSSDOCK_API int64_t fp8_group_size(DType scale_dtype);

}  // namespace crossdock
