#pragma once

#include <memory>
#include <string>

#include "crossdock/extend/strategy.hpp"
#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// Whether this build has the CUDA sources.
CROSSDOCK_API bool cuda_is_built();

/// Number of usable GPUs; 0 without CUDA, a driver or a GPU. Never throws.
CROSSDOCK_API int cuda_device_count() noexcept;

/// Why cuda_device_count() is 0; empty if it is not.
CROSSDOCK_API std::string cuda_missing_reason();

/// The GPU that a rank uses by default: the ranks on a node take its GPUs round-robin. Threads of
/// one process are numbered by rank, even on simulated nodes; processes by their position among the
/// ranks on their node. 0 without a GPU.
CROSSDOCK_API int cuda_device_of(Group& group);

/// Makes later work in the stream `waiting` wait for the work already queued in `awaited`. Both are
/// on `device`, a GPU. A null `waiting` means both the default stream and the calling thread's own.
/// Does not block. Throws Error(kUnsupported) if this build has no CUDA.
CROSSDOCK_API void make_stream_wait(Stream waiting, Stream awaited, Device device);

/// Wraps a strategy so that host tensors take the GPU's path: every call copies its tensors to the
/// GPU, runs there and copies the results back. Slow; for testing the GPU path with a program that
/// uses only host memory. fp64 stays on the host. `device` is the index of the GPU, or -1 for the
/// rank's own (cuda_device_of).
CROSSDOCK_API std::unique_ptr<Strategy> on_cuda(std::unique_ptr<Strategy> strategy,
                                                int device = -1);

}  // namespace crossdock
