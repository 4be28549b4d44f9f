#pragma once

#include <cstdint>

namespace crossdock::cuda {

/// Maximum number of experts of a plan on any GPU, and so of slots per token.
inline constexpr int32_t kMaxExperts = 8192;

/// Upper bound of the plan kernel's shared memory that does not depend on E.
inline constexpr int64_t kPlanFixedBytes = 4096;

/// Shared memory for the segments of E experts (SegmentMemory).
constexpr int64_t segment_bytes(int64_t E) {
  return (E + 1) * static_cast<int64_t>(sizeof(int64_t)) +
         4 * E * static_cast<int64_t>(sizeof(int32_t));
}

/// Whether a GPU with this much shared memory per block can plan for E experts.
constexpr bool fits_device_plan(int64_t E, int64_t shared_memory_per_block) {
  return E <= kMaxExperts && segment_bytes(E) + kPlanFixedBytes <= shared_memory_per_block;
}

}  // namespace crossdock::cuda
