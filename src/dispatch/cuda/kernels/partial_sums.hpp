#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "crossdock/dtype.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// Sums the rows of each token on this rank, locally: partials[first row] = round(acc), acc from +0
/// by fma(weight, row, acc) in fp32 in slot order. Other rows of partials are not written. If a
/// rank has not arrived, none are.
struct PartialSumsArgs {
  PlanLinks links;
  const int64_t* rows_in_use;  // [1]
  bool is_weighted;            // by the links' weights; false: all are 1
  int32_t D;
  DType dtype;                 // of rows: fp32, bf16 or fp16
  DType partial_dtype;         // fp32 or dtype
  const std::byte* rows;       // [R, D]
  std::byte* partials;         // [R, D]
  const SignalState* signals;  // of this rank
};

/// `sms`: SM limit; 0: none.
void load_partial_sums();  // before the first launch
void launch_partial_sums(const PartialSumsArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
