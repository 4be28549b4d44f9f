#pragma once

#include <memory>

#include "crossdock/crossdock.h"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::capi {

/// A communicator whose exchanges are the caller's callbacks. REQUIRES: a struct that read_struct
/// returned. Throws Error(kInvalidArgument) if it is incomplete.
std::unique_ptr<Communicator> make_callback_communicator(const crossdock_communicator& callbacks);

}  // namespace crossdock::capi
