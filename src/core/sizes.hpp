#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace crossdock {

/// No memory is larger, and a few such sizes can be added and rounded up without overflow.
inline constexpr int64_t kMaxBytes = int64_t{1} << 60;

/// The product, if it is at most `limit`. REQUIRES: no factor is negative.
std::optional<int64_t> product_within(int64_t limit, std::initializer_list<int64_t> factors);

}  // namespace crossdock
