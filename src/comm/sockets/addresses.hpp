#pragma once

#include <string>

#include "comm/sockets/socket.hpp"

namespace crossdock::comm {

/// The address by which `host` can be reached. If it is this machine's own name, the address of the
/// interface through which others reach this machine.
SocketAddress address_of_host(const std::string& host, int port);

/// The address, with port 0, of the interface through which this machine reaches `host`.
SocketAddress interface_towards(const std::string& host);

/// Where to listen: at `address` if not empty (throws kInvalidArgument unless it is numeric), else
/// as described for SocketsOptions::address.
SocketAddress address_to_listen_at(const std::string& address);

}  // namespace crossdock::comm
