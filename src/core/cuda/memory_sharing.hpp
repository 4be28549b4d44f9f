#pragma once

#include <cstdint>

namespace crossdock::cuda {

/// How the memory of an arena gets to other processes.
enum class MemorySharing : uint8_t {
  kNone,         // it does not
  kDescriptors,  // virtual memory, by file descriptors
  kFabric,       // virtual memory, by fabric handles
  kIpc,          // allocations of cudaMalloc, by cudaIpc
};

}  // namespace crossdock::cuda
