#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// Zeroes this rank's pad rows, which alignment and pad_to_capacity leave between routes' rows.
struct PadRowsArgs {
  DevicePlan plan;
  PlanShape shape;
  int32_t P;
  int32_t rank;
  int32_t num_local;  // E_local
  std::byte* rows;    // [R, row_bytes]
  int64_t row_bytes;
};

void load_pad_rows();  // before the first launch
void launch_pad_rows(const PadRowsArgs& args, cudaStream_t stream);

}  // namespace crossdock::cuda
