#pragma once

#include <memory>
#include <string>

#include "comm/nccl/communicator.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cuda {

struct NcclConnection {
  const NcclLibrary& library;
  int device = 0;                  // REQUIRES: the current one
  std::string config{};            // must be identical on every rank
  const Error* refusal = nullptr;  // why this rank refuses, if it does
};

/// An NCCL communicator with the group's ranks: the one that the group's dispatchers already use,
/// if there is one on every rank's device, else a new one. Part of the operation "plan", before
/// there is a plan. Collective. Throws the same error on all ranks if one refuses or cannot be
/// connected (kUnsupported), or if connecting takes longer than the arrival deadline; the group
/// stays usable.
std::shared_ptr<NcclCommunicator> share_nccl_communicator(Group& group,
                                                          const NcclConnection& connection);

}  // namespace crossdock::cuda
