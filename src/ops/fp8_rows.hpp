#pragma once

#include "crossdock/tensor.hpp"

namespace crossdock::ops {

/// fp8_to_bf16 for tensors on a GPU, which have been checked. The bits are those of the CPU.
void fp8_to_bf16_on_device(const Fp8ToBf16Args& args);
void load_fp8_rows();  // before ranks that share a GPU wait for each other; in builds with CUDA

}  // namespace crossdock::ops
