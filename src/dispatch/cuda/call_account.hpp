#pragma once

#include <optional>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "dispatch/cuda/call_log.hpp"

namespace crossdock::cuda {

/// What a rank knows about the call at which all ranks' devices were halted.
struct CallAccount {
  CallText call{};
  std::optional<Error> refusal{};  // why this rank refused it
};

/// The hosts meet and find out why their devices were halted. Returns the same error on every rank:
/// the one that Group::agree would have thrown had the hosts met in that call. A rank has no
/// account if its device was halted because another rank stopped; if no rank has one, the error is
/// kInternal. Collective.
Error explain_halt(Group& group, const std::optional<CallAccount>& own);

}  // namespace crossdock::cuda
