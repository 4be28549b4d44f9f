#pragma once

namespace crossdock::cuda {

struct Packing;
/// What alltoall exchanges on GPUs.
Packing alltoall_packing();

}  // namespace crossdock::cuda
