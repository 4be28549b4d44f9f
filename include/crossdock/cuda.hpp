#pragma once

#include <memory>
#include <string>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Whether this build has the CUDA sources.
CROSSDOCK_API bool cuda_is_built();

/// GPUs this process can use; 0 without CUDA, without a driver or without a GPU. Never throws.
CROSSDOCK_API int cuda_device_count() noexcept;

/// Why cuda_device_count() is 0; empty if it is not.
CROSSDOCK_API std::string cuda_missing_reason();

/// The same strategy for host tensors on a GPU: every call copies its tensors there, moves them as
/// tensors of the GPU would be, and copies the results back. To check what a GPU does with a
/// program that knows host memory only; slow. fp64 and partial_sums stay on the host.
CROSSDOCK_API std::unique_ptr<Strategy> on_cuda(std::unique_ptr<Strategy> strategy, int device = 0);

}  // namespace crossdock
