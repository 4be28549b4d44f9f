#pragma once

#include <vector>

#include "bench/measure.hpp"
#include "bench/result.hpp"
#include "bench/scenario.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// Steps on GPUs, and how the GPUs are connected (see Result).
struct CudaResult {
  std::vector<StepResult> steps{};
  int gpus = 1;
  double link_rate = 0.0;
};

/// Measures a scenario of kind kCudaMove. Ranks are threads that share the GPUs of this machine,
/// rank r on GPU r mod their number. Every step of all ranks is one CUDA graph, timed with events
/// after flushing the L2 caches; a copy of large buffers, and copies between GPUs, are timed in the
/// same run. If GPUs cannot reach each other's memory, calls cannot be captured and are timed as
/// with processes. Throws Error(kUnsupported) without CUDA or without a GPU, Error(kInternal) if a
/// result is wrong.
CudaResult run_cuda_move(const Scenario& scenario, const Repeats& repeats, bool check);

/// The same with ranks as processes. Calls are not captured: a step is timed from the first rank's
/// call until the last rank's stream is done. Collective; complete on rank 0 only.
CudaResult run_cuda_move(const Scenario& scenario, Group& group, const Repeats& repeats,
                         bool check);

/// Measures a scenario of kind kCudaLayer, on one rank: forward, forward and backward, and the
/// steps of both, each run alone through the router, the dispatcher and the experts. A step's floor
/// is the time that memory needs for its bytes or tensor cores for its flops, whichever is longer.
/// Throws like run_cuda_move.
std::vector<StepResult> run_cuda_layer(const Scenario& scenario, const Repeats& repeats,
                                       bool check);

/// Measures a scenario of kind kCudaOverlap: dispatch and experts of the same layer, separately and
/// with the dispatch in chunks beside the experts, on several shares of the SMs; and whole layers.
/// Throws like run_cuda_move.
std::vector<StepResult> run_cuda_overlap(const Scenario& scenario, const Repeats& repeats,
                                         bool check);

/// Measures a scenario of kind kCudaProducts. Throws like run_cuda_move; also Error(kUnsupported)
/// if the library is shared, which hides its kernels.
std::vector<StepResult> run_cuda_products(const Scenario& scenario, const Repeats& repeats,
                                          bool check);

/// Measures a scenario of kind kCudaQuantise. Throws like run_cuda_move.
std::vector<StepResult> run_cuda_quantise(const Scenario& scenario, const Repeats& repeats,
                                          bool check);

}  // namespace crossdock::bench
