#pragma once

#include <memory>

#include "crossdock/group.hpp"

namespace crossdock::cuda {
class QueuedCalls;
}  // namespace crossdock::cuda

namespace crossdock::comm {

/// State that this group's GPU dispatchers share, if any of them uses it.
std::weak_ptr<cuda::QueuedCalls>& queued_calls_of(Group& group);

}  // namespace crossdock::comm
