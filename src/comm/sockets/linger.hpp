#pragma once

#include <memory>
#include <vector>

#include "comm/sockets/endpoint.hpp"
#include "comm/sockets/socket.hpp"

namespace crossdock::comm {

/// Closes connections so that the peers still get everything that was sent. Closing a socket with
/// unread bytes would discard what the kernel has not sent yet, so the sockets are shut down for
/// writing and kept until the peers have closed theirs. Never waits; only the exit of the process
/// waits, for at most two seconds, until the peers have received all bytes.
void close_gently(std::vector<Socket> sockets);

/// Sends what the connections could not take yet, on a separate thread and for a limited time. For
/// an abort, which must reach the peers even if this process makes no further call. Never waits.
void flush_in_background(std::shared_ptr<Endpoint> endpoint);

}  // namespace crossdock::comm
