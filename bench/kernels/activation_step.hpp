#pragma once

#include <cuda_runtime.h>

#include <functional>

#include "bench/scenario.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::bench {

/// Queues the backward of the experts' SwiGLU alone, over all rows of `segments`, which must
/// outlive it. Null if the library is shared, which hides its kernels.
std::function<void()> make_activation_backward(const Scenario& scenario, const Segments& segments,
                                               cudaStream_t stream);

}  // namespace crossdock::bench
