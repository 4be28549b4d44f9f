#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "crossdock/group.hpp"

namespace crossdock::cuda {
class NcclCommunicator;
}  // namespace crossdock::cuda

namespace crossdock::comm {

/// State that users of this group share, as long as one of them keeps it.
std::weak_ptr<void>& attachment_of(Group& group);

/// The NCCL communicator that the library made last for this group, if a dispatcher still uses it.
std::weak_ptr<cuda::NcclCommunicator>& nccl_communicator_of(Group& group);

/// What this rank pretends of its GPU, so that tests on a machine with one GPU reach code for
/// others. Only tests set it, before the group's first plan.
struct GpuPretences {
  bool reaches_nobody = false;  // no memory of other ranks, not even of those on the same GPU
  /// Peers are kernels on another GPU, which has access to nothing that is not plain memory.
  bool peers_are_elsewhere = false;
  bool shares_no_arenas = false;   // this process shares no virtual memory
  bool threads_run_ahead = false;  // although the ranks are threads
  std::optional<int64_t> shared_memory_per_block{};
};

/// Those of the group; its subgroups inherit them.
GpuPretences& gpu_pretences_of(Group& group);

}  // namespace crossdock::comm
