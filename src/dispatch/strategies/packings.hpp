#pragma once

#include "dispatch/cuda/cuda_packed.hpp"

namespace crossdock::cuda {

// The rows that the library's strategies pack and exchange on GPUs.

Packing alltoall_packing();
Packing allgather_packing();
/// For direct and hierarchical.
Packing relay_packing();

}  // namespace crossdock::cuda
