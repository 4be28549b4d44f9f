#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dispatch/cuda/kernels/scatter.hpp"
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

/// Zeroes the rows of this rank's routes to itself. Called by a whole block.
__device__ inline void zero_own_parts(const ScatterArgs& args) {
  const int own = args.signals.rank;
  const int64_t num_routes = args.T * args.K;
  for (int i = 0; i < args.num_parts; ++i) {
    const ScatterPart& part = args.parts[i];
    zero_own_rows(args.targets, num_routes, own, part.rows.known[own], part.row_bytes);
  }
  if (args.weights == nullptr) return;
  auto* row_weights = reinterpret_cast<std::byte*>(args.row_weights.known[own]);
  zero_own_rows(args.targets, num_routes, own, row_weights, sizeof(float));
}

/// The largest vector, up to 16 bytes, that divides every row and address of a part.
inline int64_t vector_bytes(const ScatterPart& part) {
  uint64_t bits = 16 | static_cast<uint64_t>(part.row_bytes);
  bits |= reinterpret_cast<uint64_t>(part.tokens);
  for (const std::byte* rows : part.rows.known) bits |= reinterpret_cast<uint64_t>(rows);
  return static_cast<int64_t>(bits & -bits);
}

/// The same for all parts.
inline int64_t vector_bytes(const ScatterArgs& args) {
  int64_t bytes = 16;
  for (int i = 0; i < args.num_parts; ++i) bytes = std::min(bytes, vector_bytes(args.parts[i]));
  return bytes;
}

}  // namespace crossdock::cuda
