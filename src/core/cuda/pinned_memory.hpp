#pragma once

#include <cstdint>

#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

/// Page-locked host memory with unspecified contents, which the device copies to and from without
/// staging in the driver. After its last owner it is kept for later leases: page-locking is slow
/// and may wait for the device. Thread-safe.
Buffer lease_pinned_memory(int64_t num_bytes);

/// Bytes in one lease of host words.
inline constexpr int64_t kHostWordBytes = 128;

/// kHostWordBytes of zeroed, page-locked host memory that kernels on all devices can read and
/// write. Does not wait for a device, except for the first lease of a process: page-locked memory
/// cannot be allocated or freed while kernels wait for each other, so a process keeps and reuses
/// it.
Buffer lease_host_words();

}  // namespace crossdock::cuda
