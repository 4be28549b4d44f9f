#pragma once

#include <cstdint>

namespace crossdock::cuda {

/// Experts of a plan on any GPU, at most.
inline constexpr int32_t kMaxExperts = 8192;

/// Shared memory that the plan kernel needs for any number of experts, at most.
inline constexpr int64_t kPlanFixedBytes = 4096;

/// Shared memory for the segments of E experts (SegmentMemory).
constexpr int64_t segment_bytes(int64_t E) {
  return (E + 1) * static_cast<int64_t>(sizeof(int64_t)) +
         4 * E * static_cast<int64_t>(sizeof(int32_t));
}

/// Whether a GPU whose blocks may have so much shared memory can plan for E experts.
constexpr bool fits_device_plan(int64_t E, int64_t shared_memory_per_block) {
  return E <= kMaxExperts && segment_bytes(E) + kPlanFixedBytes <= shared_memory_per_block;
}

}  // namespace crossdock::cuda
