#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "ops/cuda/grouped_product.hpp"
#include "ops/cuda/hopper/operands.hpp"
#include "ops/cuda/hopper/product_params.hpp"

// Grouped products on Hopper GPUs (sm_90a), for checked arguments.

namespace crossdock::ops::hopper {

/// Loads all kernels onto the current device. False if they do not run there, because of the device
/// or because of how they were compiled.
bool load_products();

// Whether the kernels take these arguments.
bool takes(const ProductForwardArgs& args, const ProductSizes& sizes);
bool takes(const ProductDxArgs& args, const ProductSizes& sizes);
bool takes(const ProductDwArgs& args, const ProductSizes& sizes);

/// What a launch needs besides its arguments.
struct LaunchContext {
  TensorMaps& maps;
  int num_sms;
  cudaStream_t stream;
  int32_t* counters;      // [2], zero; exclusive: used by no concurrent kernel
  std::byte* dw_scratch;  // dW: dw_scratch_bytes, exclusive
};

int64_t dw_scratch_bytes(int64_t E_local);

// REQUIRES: takes(args, sizes), R > 0, E_local > 0, and the device is current.
void launch_product(const ProductForwardArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context);
void launch_product(const ProductDxArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context);
void launch_product(const ProductDwArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context);

// Used by the functions above, one per source file.
void launch_rows_forward(const ProductForwardArgs& args, const ProductSizes& sizes,
                         const LaunchContext& context);
void launch_swiglu_forward(const ProductForwardArgs& args, const ProductSizes& sizes,
                           const LaunchContext& context);
bool load_forward();
bool load_swiglu();
bool load_dx();
bool load_dw();

}  // namespace crossdock::ops::hopper
