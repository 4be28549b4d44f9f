#pragma once

#include <cstdint>

#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

/// Page-locked host memory with unspecified contents, which the device copies to and from without a
/// copy by the driver. Returned to the process with its last owner and kept for later leases:
/// page-locking is slow, and may wait for the device. Thread-safe.
Buffer lease_pinned_memory(int64_t num_bytes);

}  // namespace crossdock::cuda
