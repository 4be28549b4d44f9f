#pragma once

#include <vector>

#include "comm/sockets/socket.hpp"

namespace crossdock::comm {

/// Closes connections so that the peers still get everything that was sent. Closing a socket with
/// unread bytes would discard what the kernel has not sent yet, so the sockets are shut down for
/// writing and kept until the peers have closed theirs. Never waits; only the exit of the process
/// waits, for at most two seconds, until the peers have received all bytes.
void close_gently(std::vector<Socket> sockets);

}  // namespace crossdock::comm
