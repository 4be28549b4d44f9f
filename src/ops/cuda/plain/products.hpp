#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/grouped_product.hpp"

// Grouped products on every GPU from sm_80 on, of any width and alignment, for checked arguments:
// simple kernels that put correctness first.

namespace crossdock::ops::plain {

/// Loads all kernels onto the current device.
void load_products();

// REQUIRES: R > 0, E_local > 0, and the device is current.
void launch_product(const ProductForwardArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream);
void launch_product(const ProductDxArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream);
void launch_product(const ProductDwArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream);

}  // namespace crossdock::ops::plain
