#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// Called by all threads of a block.
__device__ inline void zero_bytes(std::byte* begin, int64_t num_bytes) {
  if ((reinterpret_cast<uint64_t>(begin) | static_cast<uint64_t>(num_bytes)) % 16 == 0) {
    for (int64_t i = threadIdx.x; i < num_bytes / 16; i += blockDim.x) {
      reinterpret_cast<uint4*>(begin)[i] = make_uint4(0, 0, 0, 0);
    }
  } else {
    for (int64_t i = threadIdx.x; i < num_bytes; i += blockDim.x) begin[i] = std::byte{0};
  }
}

/// Zeroes rows of rank `own` that are targets; rows [R, row_bytes]. Called by a whole block.
__device__ inline void zero_own_rows(const RouteTarget* targets, int64_t num_routes, int own,
                                     std::byte* rows, int64_t row_bytes) {
  for (int64_t route = 0; route < num_routes; ++route) {
    const RouteTarget target = targets[route];
    if (target.rank == own) zero_bytes(rows + target.row * row_bytes, row_bytes);
  }
}

}  // namespace crossdock::cuda
