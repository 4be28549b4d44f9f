#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "crossdock/error.hpp"

#if defined(__CUDACC__)
#define CROSSDOCK_HOST_DEVICE __host__ __device__
#else
#define CROSSDOCK_HOST_DEVICE
#endif

namespace crossdock {

enum class DType : uint8_t { kF64, kF32, kBF16, kF16, kF8E4M3, kE8M0, kI64, kI32, kU8, kBool };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    default:
      return 1;
  }
}

/// "fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "e8m0", "int64", "int32", "uint8", "bool".
CROSSDOCK_API std::string_view name_of(DType dtype) noexcept;

/// The inverse of name_of. Throws Error(kInvalidArgument), listing the valid names.
CROSSDOCK_API DType parse_dtype(std::string_view name);

/// Whether rows of this type can be summed (combine); fp8 rows can only be moved.
constexpr bool is_summable(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16;
}

// Storage types for small floats: bits only. All conversions round to nearest even, keep denormals
// and use integer arithmetic, so every machine and device gives the same bits.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct F8E4M3 {
  uint8_t bits;  // 1 sign, 4 exponent (bias 7), 3 mantissa; no infinity, 0x7f / 0xff are NaN
};
struct E8M0 {
  uint8_t bits;  // a power of two: 2^(bits - 127); 0xff is NaN
};

CROSSDOCK_HOST_DEVICE constexpr float to_float(float value) {
  return value;
}

CROSSDOCK_HOST_DEVICE constexpr float to_float(BF16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Branch-free, so loops over it vectorise: the multiplication puts normals and denormals in place
// exactly; infinity and NaN are patched afterwards.
CROSSDOCK_HOST_DEVICE constexpr float to_float(F16 value) {
  const uint32_t sign = (static_cast<uint32_t>(value.bits) & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits) & 0x7fffu;
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | sign);
}

CROSSDOCK_HOST_DEVICE constexpr float to_float(F8E4M3 value) {
  const uint32_t sign = (static_cast<uint32_t>(value.bits) & 0x80u) << 24;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits) & 0x7fu;
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  const uint32_t nan = magnitude == 0x7fu ? 0x7fc00000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | nan | sign);
}

CROSSDOCK_HOST_DEVICE constexpr float to_float(E8M0 value) {
  if (value.bits == 0xffu) return std::bit_cast<float>(0x7fc00000u);
  // 2^-127 is a denormal float.
  return std::bit_cast<float>(value.bits == 0 ? 0x00400000u
                                              : static_cast<uint32_t>(value.bits) << 23);
}

CROSSDOCK_HOST_DEVICE constexpr BF16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BF16{static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded)};
}

CROSSDOCK_HOST_DEVICE constexpr F16 to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias the exponent and round the 13 bits that fall off.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Denormal results: adding 0.5 makes the FPU round to the last bit of the fp16 grid.
  const uint32_t denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude < 0x38800000u ? magnitude : 0u) +
                              0.5f) -
      0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;                                // overflow
  result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : result;  // NaN
  return F16{static_cast<uint16_t>(sign | result)};
}

/// Rounds to nearest even; values beyond the largest finite one (448) saturate to it. A NaN keeps
/// its sign. Branch-free, so loops over it vectorise.
CROSSDOCK_HOST_DEVICE constexpr F8E4M3 to_f8e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  constexpr uint32_t kSmallestNormal = 0x3c800000u;  // 2^-6
  constexpr uint32_t kLargest = 0x7eu;               // 448
  // Normal results: rebias the exponent and round the 20 bits that fall off.
  const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  // Denormal results: adding 2^14 makes the FPU round to multiples of 2^-9, the denormal grid.
  const uint32_t denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude < kSmallestNormal ? magnitude : 0u) +
                              0x1p14f) -
      std::bit_cast<uint32_t>(0x1p14f);
  uint32_t result = magnitude < kSmallestNormal ? denormal : normal;
  result = result > kLargest ? kLargest : result;
  result = magnitude > 0x7f800000u ? 0x7fu : result;  // NaN
  return F8E4M3{static_cast<uint8_t>(sign | result)};
}

template <typename T>
CROSSDOCK_HOST_DEVICE constexpr T from_float(float value) = delete;
template <>
CROSSDOCK_HOST_DEVICE constexpr float from_float<float>(float value) {
  return value;
}
template <>
CROSSDOCK_HOST_DEVICE constexpr BF16 from_float<BF16>(float value) {
  return to_bf16(value);
}
template <>
CROSSDOCK_HOST_DEVICE constexpr F16 from_float<F16>(float value) {
  return to_f16(value);
}

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<BF16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<F16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct DTypeOf<F8E4M3> {
  static constexpr DType value = DType::kF8E4M3;
};
template <>
struct DTypeOf<E8M0> {
  static constexpr DType value = DType::kE8M0;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::kBool;
};

}  // namespace crossdock
