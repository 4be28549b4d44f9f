#pragma once

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

}  // namespace crossdock::ops
