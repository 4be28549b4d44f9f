#pragma once

#include <string_view>

#include "comm/cuda/peer_signals.cuh"
#include "crossdock/error.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// The Operation of a dispatcher's call, by the name of the call.
Operation operation_of(std::string_view name);

/// Converts a device's fault to the error that the host would report. `rank` is this rank, of P.
struct FaultReader {
  int rank;
  int P;
  int64_t num_experts;
  int64_t max_rows;
  int64_t deadline_ns;
  bool shares_gpu;  // with other ranks of this process
};
Error to_error(const Fault& fault, const FaultReader& reader);

}  // namespace crossdock::cuda
