#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "bench/measure.hpp"
#include "bench/result.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// Times how long calls outside graphs occupy the caller's thread. All steps are called in turn, a
/// few rounds at a time, before the ranks wait for their streams. Collective; the times of all
/// ranks are complete on rank 0.
std::vector<StepResult> time_host_calls(Group& group, const std::vector<Step>& steps,
                                        cudaStream_t stream, const Repeats& repeats);

}  // namespace crossdock::bench
