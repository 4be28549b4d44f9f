#pragma once

#include <array>
#include <cstddef>

namespace crossdock::comm {

using Secret = std::array<std::byte, 16>;

/// Random bytes from the kernel.
Secret make_secret();
/// Compares in constant time.
bool is_equal(const Secret& a, const Secret& b);

}  // namespace crossdock::comm
