#pragma once

#include <string>

namespace crossdock {

/// Whether this build has the CUDA sources.
bool cuda_is_built();

/// GPUs this process can use; 0 without CUDA, without a driver or without a GPU. Never throws.
int cuda_device_count() noexcept;

/// Why cuda_device_count() is 0; empty if it is not.
std::string cuda_missing_reason();

}  // namespace crossdock
