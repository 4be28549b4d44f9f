#pragma once

#include <bit>
#include <cstdint>

#include "crossdock/dtype.hpp"
#include "crossdock/fp8.hpp"

namespace crossdock::ops {

/// The scale of a group, and the factor that its values are multiplied by before they are rounded.
struct GroupScale {
  float scale;
  float factor;
};

inline constexpr uint32_t kInfinityBits = 0x7f800000u;

CROSSDOCK_HOST_DEVICE constexpr float quiet_nan() {
  return std::bit_cast<float>(0x7fc00000u);
}

/// `amax_bits`: the largest of the bits of |x|, which orders NaN above infinity above all numbers.
CROSSDOCK_HOST_DEVICE constexpr GroupScale group_scale(uint32_t amax_bits, float amax_floor,
                                                       Fp8Scale kind) {
  if (amax_bits >= kInfinityBits) return {quiet_nan(), 1.0f};
  const float amax = std::bit_cast<float>(amax_bits);
  float a = amax > amax_floor ? amax : amax_floor;
  if (a == 0.0f) return {1.0f, 1.0f};
  if (kind == Fp8Scale::kExact) {
    constexpr float kSmallest = 448.0f * 0x1p-126f;  // below it the scale would be denormal
    a = a > kSmallest ? a : kSmallest;
    return {a / 448.0f, (1.0f / a) * 448.0f};
  }
  // 448 = 1.75 * 2^8, so a / 448 needs one more if the significand of `a` is above 1.75.
  const uint32_t rounded_up = (std::bit_cast<uint32_t>(a) + 0x1fffffu) >> 23;
  const uint32_t exponent = rounded_up > 9 ? rounded_up - 8 : 1;  // biased
  return {std::bit_cast<float>(exponent << 23), std::bit_cast<float>((254u - exponent) << 23)};
}

/// A scale as it is stored. REQUIRES: for e8m0 a power of two or NaN.
template <typename Scale>
CROSSDOCK_HOST_DEVICE constexpr Scale stored_scale(float scale);
template <>
CROSSDOCK_HOST_DEVICE constexpr float stored_scale<float>(float scale) {
  return scale;
}
template <>
CROSSDOCK_HOST_DEVICE constexpr E8M0 stored_scale<E8M0>(float scale) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  return {static_cast<uint8_t>(bits >= kInfinityBits ? 0xffu : bits >> 23)};
}

/// The product, with one NaN for all machines.
CROSSDOCK_HOST_DEVICE constexpr float scaled(F8E4M3 value, float scale) {
  const float product = to_float(value) * scale;
  return (std::bit_cast<uint32_t>(product) & 0x7fffffffu) > kInfinityBits ? quiet_nan() : product;
}

/// quantise_rows and dequantise_rows for checked tensors on a GPU. Same bits as on the CPU.
void quantise_rows_on_device(const QuantiseRowsArgs& args);
void dequantise_rows_on_device(const DequantiseRowsArgs& args);
void load_fp8_rows();  // before ranks that share a GPU wait for each other; in builds with CUDA

}  // namespace crossdock::ops
