#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "crossdock/tensor.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock::ops {

// Rows in the memory of a GPU. Work is queued in `stream`. All functions throw Error(kUnsupported)
// in builds without CUDA.

/// copy_blocks for memory of `device`. The blocks themselves are in host memory and are read during
/// the call.
void copy_blocks_on_device(const CopyBlocksArgs& args, Device device, Stream stream);

/// Sets num_bytes bytes to `value`.
void fill_on_device(std::byte* data, uint8_t value, int64_t num_bytes, Device device,
                    Stream stream);

/// add for fp32, bf16 or fp16 tensors on one GPU, with the same bits.
void add_on_device(const AddArgs& args, Stream stream);

/// out = sums, rounded once, with the bits of the CPU: fp32 to bf16 or fp16, on one GPU.
void round_on_device(const ConstTensorView& sums, const TensorView& out, Stream stream);

/// Fills `memory` [3] int64, on a GPU, with the starts and counts of one segment of num_rows rows.
Segments write_segment_on_device(int64_t num_rows, const TensorView& memory, Stream stream);

void load_device_rows();  // before ranks that share a GPU wait for each other; in builds with CUDA

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
