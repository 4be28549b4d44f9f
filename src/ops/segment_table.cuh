#pragma once

#include <cstdint>

#include "crossdock/tensor.hpp"

namespace crossdock::ops {

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
