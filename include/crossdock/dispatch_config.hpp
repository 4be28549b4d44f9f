#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace crossdock {

enum class DropPolicy : uint8_t {
  kPosition,  // keeps the lowest (token, slot)
  kWeight     // keeps the largest weights, ties to the lower (token, slot)
};

/// At most C rows per expert and source rank, C = ceil((T * K / E) * factor) in double.
struct Capacity {
  double factor = 1.0;
  DropPolicy policy = DropPolicy::kPosition;
  /// Every segment has exactly C rows per source, pad rows included, with C from max_tokens.
  bool pad_to_capacity = false;
  int64_t max_tokens = 0;  // largest T of any rank and step; for pad_to_capacity
};

enum class NonFinite : uint8_t { kReject, kPropagate };

/// What the ranks of a group must have alike.
struct DispatchConfig {
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  int64_t width = 0;        // D
  int64_t alignment = 1;    // segments start at multiples: 1, 8, 16, 32, 64, 128 or 256
  std::optional<Capacity> capacity{};
  std::vector<int32_t> placement{};  // [E] expert -> rank; empty: contiguous, as even as can be
  bool partial_sums = false;  // sum per rank before travelling home: less traffic, other bits
  NonFinite nonfinite = NonFinite::kReject;  // weights
  std::optional<int64_t> max_rows{};  // R at most, at any rank; more is an agreed kCapacity error
};

/// First expert of rank r under the default placement; rank P gives E.
int64_t first_expert(int64_t num_experts, int num_ranks, int rank);

}  // namespace crossdock
