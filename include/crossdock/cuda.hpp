#pragma once

#include <memory>
#include <string>

#include "crossdock/extend/strategy.hpp"
#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// Whether this build has the CUDA sources.
CROSSDOCK_API bool cuda_is_built();

/// Number of usable GPUs; 0 without CUDA, without a driver or without a GPU. Never throws.
CROSSDOCK_API int cuda_device_count() noexcept;

/// Why cuda_device_count() is 0; empty if it is not.
CROSSDOCK_API std::string cuda_missing_reason();

/// Which GPU a rank takes if nothing else is said: the ranks of a node share its GPUs round robin.
/// Threads of one process count by rank, simulated nodes or not; processes by their place among the
/// ranks of their node. 0 without a GPU.
CROSSDOCK_API int cuda_device_of(Group& group);

/// Makes later work of the stream `waiting` wait for the work that is queued in `awaited`. Both are
/// on `device`, a GPU. A null `waiting` is the default stream and the calling thread's own. Does
/// not wait. Throws Error(kUnsupported) if this build has no CUDA.
CROSSDOCK_API void make_stream_wait(Stream waiting, Stream awaited, Device device);

/// Wraps a strategy so that host tensors take the GPU's path: every call copies its tensors to the
/// GPU, runs there and copies the results back. Slow; for testing the GPU path with a program that
/// uses host memory only. fp64 stays on the host. `device` is the index of the GPU,
/// or -1 for that of the rank: cuda_device_of its group.
CROSSDOCK_API std::unique_ptr<Strategy> on_cuda(std::unique_ptr<Strategy> strategy,
                                                int device = -1);

}  // namespace crossdock
