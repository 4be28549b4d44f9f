#pragma once

#include <vector>

#include "bench/measure.hpp"
#include "bench/result.hpp"
#include "bench/scenario.hpp"

namespace crossdock::bench {

/// Measures a scenario of kind kCudaMove: all ranks are threads that share GPU 0. Every step of all
/// ranks is one CUDA graph, timed with events after flushing the L2 cache; a copy of large buffers
/// is timed in the same run. Throws Error(kUnsupported) without CUDA or without a
/// GPU, Error(kInternal) if a result is wrong.
std::vector<StepResult> run_cuda_move(const Scenario& scenario, const Repeats& repeats, bool check);

/// Likewise a scenario of kind kCudaLayer, on one rank: forward, forward and backward, and the
/// steps of both through the router, the dispatcher and the experts alone. A step's floor is the
/// larger of what memory needs for its bytes and tensor cores for its flops.
std::vector<StepResult> run_cuda_layer(const Scenario& scenario, const Repeats& repeats,
                                       bool check);

/// Likewise a scenario of kind kCudaOverlap: dispatch and experts of the same layer, apart and with
/// the dispatch in chunks beside the experts, on several shares of the SMs; and whole layers.
std::vector<StepResult> run_cuda_overlap(const Scenario& scenario, const Repeats& repeats);

/// Likewise a scenario of kind kCudaProducts. Throws Error(kUnsupported) too if the library is
/// shared, which hides its kernels.
std::vector<StepResult> run_cuda_products(const Scenario& scenario, const Repeats& repeats,
                                          bool check);

}  // namespace crossdock::bench
