#pragma once

#include <cstdint>

namespace crossdock::cuda {

/// How other processes map the memory of an arena.
enum class MemorySharing : uint8_t {
  kNone,         // they cannot
  kDescriptors,  // virtual memory, through file descriptors
  kFabric,       // virtual memory, through fabric handles
  kIpc,          // allocations of cudaMalloc, through cudaIpc
};

}  // namespace crossdock::cuda
