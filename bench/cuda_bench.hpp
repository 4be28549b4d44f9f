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

}  // namespace crossdock::bench
