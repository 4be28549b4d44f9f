#pragma once

#include <cstdint>

#include "core/cuda/row_vector.cuh"
#include "crossdock/tensor.hpp"

namespace crossdock::ops {

/// 16 bytes of a row. Lanes take chunks of a row in turn whether or not its memory is aligned, so
/// that sums over a row have the same bits either way.
template <typename Element>
using Chunk = cuda::RowVector<Element, cuda::kWide<Element>>;

/// Columns [column, column + kWide) of a row; columns from `width` on are 0. kAligned: the row is
/// 16-byte aligned and `width` is a multiple of a chunk.
template <bool kAligned, typename Element>
__device__ inline Chunk<Element> load_chunk(const Element* row, int64_t column, int64_t width) {
  Chunk<Element> chunk;
  if constexpr (kAligned) {
    const uint4 bits = *reinterpret_cast<const uint4*>(row + column);
    __builtin_memcpy(&chunk, &bits, sizeof(chunk));
  } else {
#pragma unroll
    for (int j = 0; j < cuda::kWide<Element>; ++j) {
      chunk.elements[j] = column + j < width ? row[column + j] : Element{};
    }
  }
  return chunk;
}

/// The same for values that are used once.
template <bool kAligned, typename Element>
__device__ inline Chunk<Element> load_chunk_once(const Element* row, int64_t column,
                                                 int64_t width) {
  if constexpr (kAligned) {
    return cuda::load_once(reinterpret_cast<const Chunk<Element>*>(row + column));
  } else {
    return load_chunk<false>(row, column, width);
  }
}

/// Columns from `width` on are not stored.
template <bool kAligned, typename Element>
__device__ inline void store_chunk(Element* row, int64_t column, int64_t width,
                                   const Chunk<Element>& chunk) {
  if constexpr (kAligned) {
    uint4 bits;
    __builtin_memcpy(&bits, &chunk, sizeof(chunk));
    *reinterpret_cast<uint4*>(row + column) = bits;
  } else {
#pragma unroll
    for (int j = 0; j < cuda::kWide<Element>; ++j) {
      if (column + j < width) row[column + j] = chunk.elements[j];
    }
  }
}

/// The sum of the values of a warp's lanes, in a fixed order, on every lane.
__device__ inline float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(~0u, value, offset);
  }
  return value;
}

/// Whether all rows of a tensor are 16-byte aligned; true for a tensor that is not given.
inline bool has_aligned_rows(const ConstTensorView& tensor) {
  if (!tensor.given()) return true;
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  const int64_t row_bytes = tensor.shape[tensor.shape.rank() - 1] * size_of(tensor.dtype);
  return address % 16 == 0 && row_bytes % 16 == 0;
}

/// Segments in device memory, as kernels use them. Their rows are [first_row(), end_row()), pad
/// rows included.
struct SegmentTable {
  const int64_t* starts = nullptr;  // [num + 1]
  const int64_t* counts = nullptr;  // [num]
  int64_t num = 0;

  explicit SegmentTable(const Segments& segments)
      : starts(segments.starts), counts(segments.counts), num(segments.num_segments) {}

  __device__ int64_t first_row() const { return num > 0 ? starts[0] : 0; }
  __device__ int64_t end_row() const { return num > 0 ? starts[num] : 0; }

  /// The segment of a row, -1 for a pad row. REQUIRES: first_row() <= row < end_row().
  __device__ int64_t find(int64_t row) const {
    int64_t low = 0;
    int64_t high = num;
    while (high - low > 1) {  // starts[low] <= row < starts[high]
      const int64_t middle = (low + high) / 2;
      (starts[middle] <= row ? low : high) = middle;
    }
    return row < starts[low] + counts[low] ? low : -1;
  }
};

}  // namespace crossdock::ops
