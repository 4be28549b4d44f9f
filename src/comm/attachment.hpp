#pragma once

#include <memory>

#include "crossdock/group.hpp"

namespace crossdock::cuda {
class NcclCommunicator;
}  // namespace crossdock::cuda

namespace crossdock::comm {

/// State that users of this group share, as long as one of them keeps it.
std::weak_ptr<void>& attachment_of(Group& group);

/// The NCCL communicator that the library made last for this group, if a dispatcher still uses it.
std::weak_ptr<cuda::NcclCommunicator>& nccl_communicator_of(Group& group);

}  // namespace crossdock::comm
