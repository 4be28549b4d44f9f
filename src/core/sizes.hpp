#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>

namespace crossdock {

/// No memory is larger, and a few such sizes can be added and rounded up without overflow.
inline constexpr int64_t kMaxBytes = int64_t{1} << 60;

/// The most of a width or an inner width; a larger one is a slip of the pen.
inline constexpr int64_t kMaxWidth = std::numeric_limits<int32_t>::max();

/// The product, if it is at most `limit`. REQUIRES: no factor is negative.
std::optional<int64_t> product_within(int64_t limit, std::initializer_list<int64_t> factors);

}  // namespace crossdock
