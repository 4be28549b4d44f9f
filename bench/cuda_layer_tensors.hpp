#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "bench/scenario.hpp"
#include "crossdock/moe_layer.hpp"

namespace crossdock::bench {

/// The layer of a scenario on one rank. max_rows is set, so no call waits.
MoeLayerConfig cuda_layer_config(const Scenario& scenario);

/// Tokens, parameters, outputs and gradients of a layer on GPU 0.
struct CudaLayerTensors {
  CudaLayerTensors(const Scenario& s, cudaStream_t stream);

  OwnedTensor x, grad_out;       // [T, D]
  OwnedTensor gate;              // [E, D]
  OwnedTensor w1, w2;            // [E, 2F, D], [E, D, F]
  OwnedTensor out, grad_x;       // [T, D]
  OwnedTensor grad_gate;         // [E, D] fp32
  OwnedTensor grad_w1, grad_w2;  // in the dtype of the layer

  MoeLayerWeights weights() const;
  MoeLayerGradients grads() const;
};

/// Compares out and grad_x of the first and the last token with the fp64 reference, for the routes
/// that the router chose. Throws Error(kInternal).
void check_layer(const Scenario& scenario, const CudaLayerTensors& tensors,
                 const RouterOutput& routes, cudaStream_t stream);

}  // namespace crossdock::bench
