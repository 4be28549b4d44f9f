#pragma once

#include <cstdint>

#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

/// Bytes in one lease of host words.
inline constexpr int64_t kHostWordBytes = 128;

/// kHostWordBytes of zeroed, page-locked host memory that kernels on all devices can read and
/// write. Does not wait for a device, except for the first lease of a process: page-locked memory
/// cannot be allocated or freed while kernels wait for each other, so a process keeps and reuses
/// it.
Buffer lease_host_words();

}  // namespace crossdock::cuda
