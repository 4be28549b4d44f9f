#pragma once

#include "crossdock/tensor.hpp"

namespace crossdock {

/// Rows of fp8 with their scales, as a dispatch delivers them, made into bf16.
/// `out` must not overlap the others.
/// out[r, d] = round(rows[r, d] * scale of d's group in row r): the product in fp32, one rounding.
struct Fp8ToBf16Args {
  ConstTensorView rows{};    // [R, D] fp8 e4m3
  ConstTensorView scales{};  // [R, ceil(D/128)] fp32, or [R, ceil(D/32)] e8m0 (MXFP8)
  TensorView out{};          // [R, D] bf16
  Stream stream{};           // for tensors on a GPU; all three are on one device
};
void fp8_to_bf16(const Fp8ToBf16Args& args);

/// Values that share a scale: 128 with fp32 scales, 32 with e8m0.
/// Throws Error(kInvalidArgument) for other dtypes.
int64_t fp8_group_size(DType scale_dtype);

}  // namespace crossdock
