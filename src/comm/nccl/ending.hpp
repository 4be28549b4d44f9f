#pragma once

#include <nccl.h>

#include <chrono>

#include "comm/nccl/library.hpp"

namespace crossdock::cuda {

/// How an NCCL communicator ends.
enum class NcclEnd {
  kDestroy,  // after its operations have completed
  kAbort     // stops its operations, whose kernels may wait for a peer forever
};

/// Ends `comm` on a separate thread: NCCL does not return before the other ranks on this node have
/// ended theirs, and they may keep them. A process that exits waits for such threads, but at most
/// `patience` after this call. If no thread can be started, the communicator is left as it is.
void end_in_background(const NcclLibrary& library, ncclComm_t comm, NcclEnd end,
                       std::chrono::nanoseconds patience) noexcept;

/// For tests: waits until all these threads have finished. Returns false if they take longer.
bool await_endings(std::chrono::nanoseconds limit);

}  // namespace crossdock::cuda
