#pragma once

#include "crossdock/tensor.hpp"

namespace crossdock::ops {

/// fp8_to_bf16 for checked tensors on a GPU. Same bits as on the CPU.
void fp8_to_bf16_on_device(const Fp8ToBf16Args& args);
void load_fp8_rows();  // before ranks that share a GPU wait for each other; in builds with CUDA

}  // namespace crossdock::ops
