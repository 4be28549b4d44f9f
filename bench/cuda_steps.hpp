#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <string>
#include <vector>

#include "bench/cuda_graph.hpp"
#include "bench/cuda_memory.hpp"
#include "bench/measure.hpp"
#include "bench/result.hpp"
#include "bench/scenario.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// Throws Error(kUnsupported) without a GPU.
void require_gpu(const Scenario& scenario);

/// Upper bounds of a GPU's speed.
struct GpuRates {
  double bytes_per_us = 0.0;  // of a large copy, measured
  double flops_per_us = 0.0;  // of large bf16 products on tensor cores: 780 TFLOP/s on an H200

  double floor_us(double bytes, double flops) const;
};

/// Times steps of one rank, each captured in a graph that is replayed with a cold L2 cache.
class CudaStepTimer {
 public:
  explicit CudaStepTimer(const Repeats& repeats);

  cudaStream_t stream() const { return streams_.of(0); }

  /// Runs the step once by itself, then replays it. `settle` is called after both, when its results
  /// are complete and no longer in use. `runs`: how often step.run executes the step; times are per
  /// execution.
  StepResult time(Group& group, const Step& step, int runs = 1);

 private:
  Repeats repeats_;
  RankStreams streams_;
  GpuRates rates_;
  CacheFlush flush_;
};

}  // namespace crossdock::bench
