#pragma once

#include "crossdock/dtype.hpp"

namespace crossdock::cli {

/// Distance between neighbouring values near 1, for fp64, fp32, bf16 and fp16.
constexpr double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-52;
    case DType::kF32:
      return 0x1p-23;
    case DType::kF16:
      return 0x1p-10;
    default:
      return 0x1p-7;
  }
}

/// Smallest positive value, for the same dtypes.
constexpr double denormal_spacing_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-1074;
    case DType::kF32:
      return 0x1p-149;
    case DType::kF16:
      return 0x1p-24;
    default:
      return 0x1p-133;
  }
}

}  // namespace crossdock::cli
