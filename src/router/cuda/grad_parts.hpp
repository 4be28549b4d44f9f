#pragma once

#include <cstdint>

#include "crossdock/dtype.hpp"

namespace crossdock::router {

/// Gradients of the logits as sums of three bf16 numbers each, without rounding
/// (split_product.cuh). The copy engine reads them, so rows are aligned to 16 bytes.
struct GradParts {
  BF16* values = nullptr;  // [3, T, pitch], the smallest parts first; null: there are none
  int64_t pitch = 0;       // elements from token to token, at least E and a multiple of 8
};
inline constexpr int kNumParts = 3;

/// The kernel of the gradient of x holds the parts of all experts in shared memory.
inline constexpr int64_t kMostExpertsInParts = 128;

}  // namespace crossdock::router
