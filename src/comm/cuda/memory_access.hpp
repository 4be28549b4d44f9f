#pragma once

#include "comm/cuda/memory_reach.hpp"

namespace crossdock::cuda {

/// How the memory at `data` was allocated; kGranted if the driver does not know.
MemoryKind kind_of(const void* data);

/// Whether the owner of memory of kind kGranted gave `device` read and write access.
bool has_access(int device, const void* data);

}  // namespace crossdock::cuda
