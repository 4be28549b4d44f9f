#pragma once

#include <optional>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "dispatch/cuda/call_log.hpp"

namespace crossdock::cuda {

/// What a rank knows of the call at which the devices of all ranks were halted.
struct CallAccount {
  CallText call{};
  std::optional<Error> refusal{};  // why this rank refused it
};

/// The hosts meet and find out why their devices were halted. Returns the error, the same on every
/// rank: what Group::agree would have thrown had the hosts met in that call. A rank may have no
/// account, if its device was halted because another rank stopped; kInternal if no rank has one.
/// Collective.
Error explain_halt(Group& group, const std::optional<CallAccount>& own);

}  // namespace crossdock::cuda
