#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/hopper/tensor_map.hpp"
#include "router/cuda/grad_gate.hpp"

// The gradient of a gate from bf16 tokens on sm_90a.

namespace crossdock::router::hopper {

/// Loads the kernels onto the current device. False if they were not compiled for it.
bool load_grad_gate();

/// Writes the sums of the slices, or grad_gate if there is one slice. REQUIRES: args.parts; x and
/// its rows are aligned to 16 bytes; no jitter.
void launch_grad_gate(const GradGateArgs& args, ops::hopper::TensorMaps& maps, cudaStream_t stream);

}  // namespace crossdock::router::hopper
