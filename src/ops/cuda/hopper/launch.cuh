#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "ops/cuda/hopper/product_kernel.cuh"
#include "ops/cuda/hopper/products.hpp"

namespace crossdock::ops::hopper {

/// Loads a kernel onto the current device. False if it was not compiled for sm_90a: it then has no
/// body, and thus no barriers in shared memory.
template <typename Product>
bool load_product() {
  const auto kernel = product_kernel<Product>;
  cuda::load_kernels(kernel);
  CROSSDOCK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      Product::Shape::kSharedBytes));
  cudaFuncAttributes attributes{};
  CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.sharedSizeBytes > 0;
}

/// Launches as many clusters as fit on the SMs. may_start_early: see cuda::launch_early.
template <typename Product>
void launch_kernel(const OperandMaps& maps, const ProductParams& params,
                   const LaunchContext& context, bool may_start_early) {
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kClusterSize, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const int num_clusters = std::max(1, context.num_sms / kClusterSize);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_clusters * kClusterSize));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Product::Shape::kSharedBytes;
  config.stream = context.stream;
  config.attrs = attributes.data();
  config.numAttrs = may_start_early ? 2 : 1;
  CROSSDOCK_CUDA(cudaLaunchKernelEx(&config, product_kernel<Product>, maps, params));
}

/// The parameters that all products have.
inline ProductParams make_params(const ProductSizes& sizes, const Segments& segments,
                                 const TensorView& out, const LaunchContext& context) {
  ProductParams params{};
  params.starts = segments.starts;
  params.counts = segments.counts;
  params.num_experts = static_cast<int>(sizes.E_local);
  params.N = static_cast<int>(sizes.N);
  params.K = static_cast<int>(sizes.K);
  params.out = out.data;
  params.counters = context.counters;
  return params;
}

inline UnusedRows unused_rows_of(const Segments& segments, const TensorView& out) {
  return {.starts = segments.starts,
          .counts = segments.counts,
          .num_experts = static_cast<int>(segments.num_segments),
          .R = out.num_rows(),
          .rows = static_cast<std::byte*>(out.data),
          .row_bytes = out.row_bytes()};
}

/// Calls work with a BF16 or F16, for a template argument.
template <typename Work>
void with_element(DType dtype, const Work& work) {
  if (dtype == DType::kBF16) {
    work(BF16{});
  } else {
    work(F16{});
  }
}

}  // namespace crossdock::ops::hopper
