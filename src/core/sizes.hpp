#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>

namespace crossdock {

/// Larger than any memory; a few such sizes can be added and rounded up without overflow.
inline constexpr int64_t kMaxBytes = int64_t{1} << 60;

/// The largest width or inner width; a larger one is assumed to be a mistake.
inline constexpr int64_t kMaxWidth = std::numeric_limits<int32_t>::max();

/// Pools hand out memory in multiples of this size.
inline constexpr int64_t kPageBytes = 4096;

/// The smallest multiple of `multiple` that is at least `value`. REQUIRES: value >= 0.
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// A position as containers take it. REQUIRES: i >= 0.
constexpr size_t index(int64_t i) {
  return static_cast<size_t>(i);
}

/// The product, if it is at most `limit`. REQUIRES: no factor is negative.
std::optional<int64_t> product_within(int64_t limit, std::initializer_list<int64_t> factors);

}  // namespace crossdock
