#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace crossdock::comm {

inline void append(std::vector<std::byte>& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

/// An IP address with a port, in a form that fits into a blob.
struct SocketAddress {
  int32_t family = 0;                 // 4, 6, or 0: none
  int32_t port = 0;                   // host byte order
  std::array<uint8_t, 16> address{};  // network byte order; the first 4 bytes for family 4

  bool operator==(const SocketAddress&) const = default;
  bool is_loopback() const;
  std::string host_text() const;  // "10.0.0.1", "fe80::1"
  std::string text() const;       // "10.0.0.1:29500", "[fe80::1]:29500"
};

/// Owns a socket. In a forked child it is closed at once and the copy does nothing: a child that
/// outlives its parent does not keep the parent's connections open.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor);
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  void close();
  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
  uint64_t generation_ = 0;
};

/// Parses a numeric address; nullopt if `text` is not one.
std::optional<SocketAddress> parse_address(const std::string& text, int port);
/// The first address of a host name or address. Throws kCommunication if there is none.
SocketAddress resolve(const std::string& host, int port);
/// The address of this machine from which packets to `target` are sent; nullopt if there is no
/// route.
std::optional<SocketAddress> local_address_towards(const SocketAddress& target);

/// A non-blocking listening socket; port 0 chooses a free one. nullopt if the port is taken; throws
/// kCommunication on other failures.
std::optional<Socket> listen_at(const SocketAddress& address);
SocketAddress address_of(const Socket& socket);

/// Starts to connect without waiting; the socket becomes writable when it is connected or has
/// failed. `error` is the error number if it has failed already, else 0. Does not throw.
Socket start_connecting(const SocketAddress& target, int& error);
/// 0 if connected, the error number if connecting has failed.
int connect_error(const Socket& socket);
/// The next connection, non-blocking; nullopt if there is none, with errno as accept set it.
std::optional<Socket> accept_from(const Socket& listener);

/// Whether a call that failed with this error number may be tried again later.
bool is_temporary(int error);

/// Makes small messages go out at once, and detects within a minute that the machine of an idle
/// peer has vanished. A peer that does not read for a long time is not a failure: deadlines handle
/// that.
void set_connection_options(const Socket& socket);

/// The address by which `host` can be reached. If it is this machine's own name, the address of the
/// interface through which others reach this machine.
SocketAddress address_of_host(const std::string& host, int port);

/// The address, with port 0, of the interface through which this machine reaches `host`.
SocketAddress interface_towards(const std::string& host);

/// Where to listen: at `address` if not empty (throws kInvalidArgument unless it is numeric), else
/// as described for SocketsOptions::address.
SocketAddress address_to_listen_at(const std::string& address);

}  // namespace crossdock::comm
