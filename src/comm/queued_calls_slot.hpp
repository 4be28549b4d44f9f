#pragma once

#include <memory>

#include "crossdock/group.hpp"

namespace crossdock::cuda {
class QueuedCalls;
}  // namespace crossdock::cuda

namespace crossdock::comm {

/// What the dispatchers of this group on GPUs share, if there is one that uses it.
std::weak_ptr<cuda::QueuedCalls>& queued_calls_of(Group& group);

}  // namespace crossdock::comm
