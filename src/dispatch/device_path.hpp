#pragma once

#include <memory>

#include "dispatch/path.hpp"

namespace crossdock {

// GPU paths of the library's strategies. Each throws Error(kUnsupported) if the build has no CUDA
// or the machine has no such device.

std::unique_ptr<Path> make_allgather_device_path(const PathContext& context, Device device);
std::unique_ptr<Path> make_alltoall_device_path(const PathContext& context, Device device);
/// For direct and hierarchical. sums_per_rank: partial sums are made per rank, otherwise per node.
std::unique_ptr<Path> make_direct_device_path(const PathContext& context, Device device,
                                              bool sums_per_rank);

/// How the ranks' GPUs relate to each other.
struct GpuRelation {
  bool reach_each_other = true;  // within every node, GPUs reach each other's memory
  bool are_several = false;
  bool are_shared = false;  // some ranks of a node use the same GPU
};

/// Collective; called before a path is made. The result is the same on all ranks. `device` is this
/// rank's. If a rank refuses its device or has an invalid configuration, all ranks throw the same
/// error.
GpuRelation agree_on_gpus(const PathContext& context, Device device);

/// Wraps a path on a GPU: every call copies its host tensors to the GPU, and the results back.
std::unique_ptr<Path> make_host_tensors_path(std::unique_ptr<Path> path, Group& group,
                                             Device device);

/// The error that the functions above throw in builds without CUDA.
Error no_cuda_error();

}  // namespace crossdock
