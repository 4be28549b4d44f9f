#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "crossdock/dtype.hpp"

// Pairs of adjacent 16-bit values in one register, the first one in the low half.

namespace crossdock::ops {

template <typename Element>
__device__ uint32_t pack(float first, float second);

template <>
__device__ inline uint32_t pack<BF16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t pack<F16>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename Element>
__device__ float2 unpack(uint32_t pair);

template <>
__device__ inline float2 unpack<BF16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ inline float2 unpack<F16>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

/// silu(gate) * linear, for 16-bit results.
__device__ inline float swiglu(float gate, float linear) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * linear;
}

}  // namespace crossdock::ops
