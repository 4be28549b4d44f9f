#pragma once

#include <memory>

#include "dispatch/path.hpp"

namespace crossdock {

// The paths of the library's strategies for tensors on a GPU. Each throws Error(kUnsupported) if
// the build has no CUDA or the machine no such device.

std::unique_ptr<Path> make_allgather_device_path(const PathContext& context, Device device);
std::unique_ptr<Path> make_alltoall_device_path(const PathContext& context, Device device);
/// For direct and hierarchical. sums_per_rank: partial sums are made per rank, otherwise per node.
std::unique_ptr<Path> make_direct_device_path(const PathContext& context, Device device,
                                              bool sums_per_rank);

/// The GPUs of the ranks.
struct GpuRelation {
  bool reach_each_other = true;  // those of every node reach each other's memory
  bool are_several = false;
  bool are_shared = false;  // some ranks of a node use the same GPU
};

/// Collective, before a path is made; the same on all ranks. `device` is this rank's. If a rank
/// refuses it, or has an error in its configuration, all ranks throw the same error.
GpuRelation agree_on_gpus(const PathContext& context, Device device);

/// Copies host tensors to a GPU for every call, and the results back. `path` is the GPU's.
std::unique_ptr<Path> make_host_tensors_path(std::unique_ptr<Path> path, Group& group,
                                             Device device);

/// The error that these throw in builds without CUDA.
Error no_cuda_error();

}  // namespace crossdock
