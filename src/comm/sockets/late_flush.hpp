#pragma once

#include <memory>

#include "comm/sockets/endpoint.hpp"

namespace crossdock::comm {

/// Sends what the connections could not take yet, on a separate thread and for a limited time. For
/// an abort, which must reach the peers even if this process makes no further call. Never waits.
void flush_in_background(std::shared_ptr<Endpoint> endpoint);

}  // namespace crossdock::comm
