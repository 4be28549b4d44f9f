#pragma once

#include "dispatch/cuda/cuda_rank.hpp"

namespace crossdock::cuda {

// Checks of what a caller gave for a plan on the GPU; each throws Error(kInvalidArgument) that
// names the tensor.

/// What is given to a dispatch, except for outputs.
void check_tokens(const CudaRank& rank, const DispatchArgs& args, int64_t T);

/// Rows that can be summed on the GPU.
void check_rows_dtype(const char* name, const ConstTensorView& rows);

/// The inputs of combine_backward.
void check_gradients(const CudaRank& rank, const Plan& plan, const ConstTensorView& grad_out,
                     const ConstTensorView& y);

}  // namespace crossdock::cuda
