#pragma once

#include <memory>

#include "crossdock/crossdock.h"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::capi {

/// A communicator whose exchanges are the caller's callbacks. REQUIRES: a struct that read_struct
/// returned. Throws Error(kInvalidArgument) if it is incomplete. Before own_context, its destructor
/// calls nothing: if no group can be made, the caller still owns the context.
std::unique_ptr<Communicator> make_callback_communicator(const crossdock_communicator& callbacks);

/// From now on, the communicator's destructor calls the leave and destroy callbacks. REQUIRES:
/// `communicator` came from make_callback_communicator.
void own_context(Communicator& communicator);

}  // namespace crossdock::capi
