#pragma once

#include <memory>

#include "dispatch/path.hpp"

namespace crossdock {

namespace cuda {
struct Packing;
/// What alltoall exchanges on GPUs.
Packing alltoall_packing();
}  // namespace cuda

std::unique_ptr<Path> make_alltoall_device_path(const PathContext& context, Device device);

}  // namespace crossdock
