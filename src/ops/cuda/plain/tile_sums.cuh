#pragma once

#include <cstdint>

#include "crossdock/dtype.hpp"

namespace crossdock::ops::plain {

inline constexpr int kTile = 64;      // rows and columns of a block's tile
inline constexpr int kDepth = 32;     // of a step along the inner dimension
inline constexpr int kThreads = 128;  // warp w has rows 16w to 16w + 15

/// Both operands of a step in shared memory, lines along the inner dimension. Lines are padded so
/// that the lanes of a warp read different banks.
template <typename Element>
struct StepTiles {
  static constexpr int kPitch = kDepth + 16 / static_cast<int>(sizeof(Element));
  alignas(16) Element a[kTile][kPitch];
  alignas(16) Element b[kTile][kPitch];
};

/// A thread's sums: lane 4g + t has columns 8j + 2t and 8j + 2t + 1 of rows g (values[j][0], [1])
/// and g + 8 (values[j][2], [3]) of its warp.
struct TileSums {
  float values[kTile / 8][4] = {};
};

template <typename Element>
__device__ void mma(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ inline void mma<BF16>(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ inline void mma<F16>(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Adds the products of one step, in ascending order: on tensor cores for 16-bit values, which take
/// 16 products at a time.
template <typename Element>
__device__ void add_step(TileSums& sums, const StepTiles<Element>& tiles, int warp, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const auto pair = [](const Element* first) { return *reinterpret_cast<const uint32_t*>(first); };
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    const Element* const upper = &tiles.a[16 * warp + g][k + 2 * t];
    const Element* const lower = &tiles.a[16 * warp + g + 8][k + 2 * t];
    const uint32_t a[4] = {pair(upper), pair(lower), pair(upper + 8), pair(lower + 8)};
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const Element* const column = &tiles.b[8 * j + g][k + 2 * t];
      const uint32_t b[2] = {pair(column), pair(column + 8)};
      mma<Element>(sums.values[j], a, b);
    }
  }
}

/// In fp32, one product at a time.
template <>
__device__ inline void add_step(TileSums& sums, const StepTiles<float>& tiles, int warp, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  for (int k = 0; k < kDepth; ++k) {
    const float upper = tiles.a[16 * warp + g][k];
    const float lower = tiles.a[16 * warp + g + 8][k];
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const float left = tiles.b[8 * j + 2 * t][k];
      const float right = tiles.b[8 * j + 2 * t + 1][k];
      sums.values[j][0] = fmaf(upper, left, sums.values[j][0]);
      sums.values[j][1] = fmaf(upper, right, sums.values[j][1]);
      sums.values[j][2] = fmaf(lower, left, sums.values[j][2]);
      sums.values[j][3] = fmaf(lower, right, sums.values[j][3]);
    }
  }
}

}  // namespace crossdock::ops::plain
