#pragma once

namespace crossdock::cuda {

/// Loads all kernels that any call may need: loading one may wait until the device is idle, while
/// kernels of another dispatcher may be waiting for a rank that has not launched.
void load_all_kernels();

}  // namespace crossdock::cuda
