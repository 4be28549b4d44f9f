#pragma once

#include <array>

#include "crossdock/tensor.hpp"

namespace crossdock::ops {

// Ragged rows on a GPU. All tensors and segments are on one device, where work is queued in
// `stream`. R may exceed the rows of the segments, which are counted on the device. Rows are fp32,
// bf16 or fp16, sums fp32.

/// Zeroes the rows of each tensor that belong to no segment: pad rows, and rows past the last
/// segment.
struct ZeroUnusedRowsArgs {
  std::array<TensorView, 2> tensors;  // [R, ...] each; the second is optional
  Segments segments;
};
void zero_unused_rows_on_device(const ZeroUnusedRowsArgs& args, Stream stream);

/// rows[r] = round(rows[r] + row_weights[r] * bias[e]).
struct AddWeightedBiasArgs {
  ConstTensorView bias;         // [E_local, D]
  ConstTensorView row_weights;  // [R] fp32
  Segments segments;
  TensorView rows;  // in and out [R, D], in the dtype of `bias` or in fp32
};
void add_weighted_bias_on_device(const AddWeightedBiasArgs& args, Stream stream);

/// sums[e] (+)= sum over the rows r of segment e of row_weights[r] * rows[r], in an order that
/// depends on the segment's count alone.
struct SumSegmentsArgs {
  ConstTensorView rows;         // [R, W]
  ConstTensorView row_weights;  // [R] fp32, optional: 1
  Segments segments;
  TensorView sums;  // out [E_local, W] fp32
  /// true: adds to `sums` and leaves those of empty segments unchanged. false: overwrites; the sums
  /// of empty segments are 0.
  bool accumulate = false;
};
void sum_segments_on_device(const SumSegmentsArgs& args, Stream stream);

/// Call it before ranks that share a GPU wait for each other.
void load_device_segments(DType dtype, Device device);

}  // namespace crossdock::ops
