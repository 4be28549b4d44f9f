#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/hopper/operands.hpp"
#include "router/cuda/kernels.hpp"

// The gradients of bf16 tokens and of a bf16 gate on sm_90a, in one pass over the tokens.

namespace crossdock::router::hopper {

/// Shared memory per block that the kernel needs.
inline constexpr int kGradSharedBytes = 226 << 10;

/// Loads the kernels onto the current device. False if they were not compiled for it.
bool load_gradients();

/// launch_grad_x and launch_grad_gate, with their bits. Takes grad_logits from `parts`. An output
/// that is null is not needed, but one is given. REQUIRES: T > 0, at most kMostExpertsInParts
/// experts, no jitter; x, gate, grad_x and their rows are bf16 and aligned to 16 bytes.
void launch_gradients(const GradParts& parts, const GradXArgs& of_x, const GradGateArgs& of_gate,
                      ops::hopper::TensorMaps& maps, cudaStream_t stream);

// Logits of 16-bit tokens and gates on sm_90a, limited by the memory traffic of x.

/// Loads the kernels onto the current device. False if they were not compiled for it.
bool load_logits();

/// Whether the kernels take these arguments on the current device. REQUIRES: x and gate are both
/// bf16 or both fp16, without jitter.
bool takes(const LogitsArgs& args, const LogitsMeans& means);

/// REQUIRES: takes(args, means).
void launch_logits(const LogitsArgs& args, const LogitsMeans& means, cudaStream_t stream);

}  // namespace crossdock::router::hopper
