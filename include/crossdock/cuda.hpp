#pragma once

#include <string>

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

}  // namespace crossdock
