#pragma once

#include <cstdint>

#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

/// Bytes in one lease of host words.
inline constexpr int64_t kHostWordBytes = 128;

/// kHostWordBytes of zeroed host memory that kernels of all devices can read and write
/// (page-locked). Made without waiting for a device, except for the first lease of a process:
/// page-locked memory cannot be made or given back while kernels wait for each other, so a process
/// keeps what it has and hands it out again.
Buffer lease_host_words();

}  // namespace crossdock::cuda
