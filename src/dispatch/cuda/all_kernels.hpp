#pragma once

namespace crossdock::cuda {

/// Loads all kernels that any call may need. Loading one later could deadlock: it may wait until
/// the device is idle, while another dispatcher's kernels wait for a rank that has not launched
/// yet.
void load_all_kernels();

}  // namespace crossdock::cuda
