#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// Counts of routes on the device (RouterStatistics::device_counts).

namespace crossdock::router {

struct SumCountsArgs {
  const int64_t* a;  // [count]
  const int64_t* b;  // [count]
  int64_t count;
  int64_t* sum;  // out: [count]
};

/// Counts of n batches, each as RouterStatistics::device_counts, added up to those of one.
struct SumBatchesKernelArgs {
  const int64_t* counts;  // [n, B * E + B]
  int64_t num_batches;    // n
  int64_t num_sequences;  // B
  int64_t E;
  int64_t* sum;  // out: [E + 1]
};

/// bias[e] += rate * sign(mean load - load[e]), with the bits of the CPU.
struct UpdateBiasArgs {
  const int64_t* routes;  // [B, E]
  int64_t num_sequences;  // B
  int64_t E;
  double rate;
  bool centred;
  float* bias;  // in and out: [E]
};

void load_counts();
void launch_sum_counts(const SumCountsArgs& args, cudaStream_t stream);
void launch_sum_batches(const SumBatchesKernelArgs& args, cudaStream_t stream);
void launch_update_bias(const UpdateBiasArgs& args, cudaStream_t stream);

}  // namespace crossdock::router
