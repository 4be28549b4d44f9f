#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/check.hpp"
#include "crossdock/dtype.hpp"

namespace crossdock::cuda {

/// kCount contiguous elements of a row in registers, laid out as in memory.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) RowVector {
  Element elements[kCount];
};

/// Elements in 16 bytes.
template <typename Element>
inline constexpr int kWide = 16 / static_cast<int>(sizeof(Element));

/// Calls `use` with a value of the dtype's element type, for dtypes that kernels compute with.
template <typename Use>
void with_element(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kF32:
      return use(float{});
    case DType::kBF16:
      return use(BF16{});
    case DType::kF16:
      return use(F16{});
    default:
      CROSSDOCK_CHECK(false, "rows on the GPU must be fp32, bf16 or fp16 to be computed with, got ",
                      name_of(dtype));
  }
}

// For values that are used once: the loads do not allocate in the L1 cache.
template <typename Vector>
__device__ inline Vector load_once(const Vector* from) {
  Vector value;
  if constexpr (sizeof(Vector) == 16) {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(from));
    __builtin_memcpy(&value, &bits, sizeof(value));
  } else if constexpr (sizeof(Vector) == 8) {
    const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(from));
    __builtin_memcpy(&value, &bits, sizeof(value));
  } else if constexpr (sizeof(Vector) == 4) {
    const uint32_t bits = __ldcs(reinterpret_cast<const uint32_t*>(from));
    __builtin_memcpy(&value, &bits, sizeof(value));
  } else {
    static_assert(sizeof(Vector) == 2);
    const uint16_t bits = __ldcs(reinterpret_cast<const uint16_t*>(from));
    __builtin_memcpy(&value, &bits, sizeof(value));
  }
  return value;
}

template <typename Vector>
__device__ inline void store_once(Vector* to, const Vector& value) {
  if constexpr (sizeof(Vector) == 16) {
    uint4 bits;
    __builtin_memcpy(&bits, &value, sizeof(value));
    __stcs(reinterpret_cast<uint4*>(to), bits);
  } else {
    *to = value;
  }
}

// The device's conversions match those of crossdock/dtype.hpp except in the bits of NaN.
__device__ inline float widen(float value) {
  return value;
}
__device__ inline float widen(BF16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ inline float widen(F16 value) {
  return __half2float(__ushort_as_half(value.bits));
}

template <typename Element>
__device__ Element narrow(float value);
template <>
__device__ inline float narrow<float>(float value) {
  return value;
}
template <>
__device__ inline BF16 narrow<BF16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}
template <>
__device__ inline F16 narrow<F16>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}

}  // namespace crossdock::cuda
