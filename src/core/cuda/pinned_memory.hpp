#pragma once

#include <cstdint>

#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

/// Page-locked host memory with unspecified contents, which the device copies to and from without
/// staging in the driver. After its last owner it is kept for later leases: page-locking is slow
/// and may wait for the device. Thread-safe.
Buffer lease_pinned_memory(int64_t num_bytes);

}  // namespace crossdock::cuda
