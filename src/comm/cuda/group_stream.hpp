#pragma once

#include <cuda_runtime.h>

#include "core/cuda/stream.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cuda {

/// The stream in which calls of a group's rank queue their work: the given one. Ranks that are
/// threads of one process use cudaStreamPerThread instead of a default stream: in one queue, the
/// kernels of several ranks would wait for each other forever.
inline cudaStream_t group_stream(Group& group, Stream stream) {
  const cudaStream_t given = handle_of(stream);
  const bool is_default = given == nullptr || given == cudaStreamLegacy;
  const bool shares_queue =
      is_default && group.size() > 1 && group.communicator().shares_address_space();
  return shares_queue ? cudaStreamPerThread : given;
}

}  // namespace crossdock::cuda
