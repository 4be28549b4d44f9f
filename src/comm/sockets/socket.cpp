#include "comm/sockets/socket.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "core/check.hpp"
#include "core/descriptor.hpp"
#include "core/process.hpp"

namespace crossdock::comm {
namespace {

// Never freed: used while the process exits.
struct OpenSockets {
  std::mutex mutex;
  std::set<int> descriptors;
};

OpenSockets& open_sockets() {
  static auto* all = new OpenSockets;
  return *all;
}

void before_fork() {
  open_sockets().mutex.lock();
}
void after_fork_in_parent() {
  open_sockets().mutex.unlock();
}
void after_fork_in_child() {
  for (const int descriptor : open_sockets().descriptors) ::close(descriptor);
  open_sockets().descriptors.clear();
  open_sockets().mutex.unlock();
}

void watch_forks() {
  static std::once_flag once;
  std::call_once(once,
                 [] { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); });
}

struct NativeAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

NativeAddress to_native(const SocketAddress& address) {
  NativeAddress native;
  if (address.family == 4) {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = htons(static_cast<uint16_t>(address.port));
    std::memcpy(&in.sin_addr, address.address.data(), sizeof in.sin_addr);
    std::memcpy(&native.storage, &in, sizeof in);
    native.length = sizeof in;
  } else {
    sockaddr_in6 in{};
    in.sin6_family = AF_INET6;
    in.sin6_port = htons(static_cast<uint16_t>(address.port));
    std::memcpy(&in.sin6_addr, address.address.data(), sizeof in.sin6_addr);
    std::memcpy(&native.storage, &in, sizeof in);
    native.length = sizeof in;
  }
  return native;
}

std::optional<SocketAddress> from_native(const sockaddr* native) {
  SocketAddress address;
  if (native->sa_family == AF_INET) {
    sockaddr_in in{};
    std::memcpy(&in, native, sizeof in);
    address.family = 4;
    address.port = ntohs(in.sin_port);
    std::memcpy(address.address.data(), &in.sin_addr, sizeof in.sin_addr);
    return address;
  }
  if (native->sa_family == AF_INET6) {
    sockaddr_in6 in{};
    std::memcpy(&in, native, sizeof in);
    address.family = 6;
    address.port = ntohs(in.sin6_port);
    std::memcpy(address.address.data(), &in.sin6_addr, sizeof in.sin6_addr);
    return address;
  }
  return std::nullopt;
}

[[noreturn]] void throw_errno(const std::string& what) {
  throw Error(ErrorCode::kCommunication, concat(what, ": ", std::strerror(errno)));
}

int open_descriptor(const SocketAddress& address, int type) {
  const int family = address.family == 4 ? AF_INET : AF_INET6;
  return above_standard(::socket(family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

Socket open_socket(const SocketAddress& address, int type) {
  const int descriptor = open_descriptor(address, type);
  if (descriptor < 0) throw_errno("cannot open a socket");
  return Socket(descriptor);
}

}  // namespace

bool SocketAddress::is_loopback() const {
  if (family == 4) return address[0] == 127;
  std::array<uint8_t, 16> loopback{};
  loopback.back() = 1;
  return family == 6 && address == loopback;
}

std::string SocketAddress::host_text() const {
  std::array<char, INET6_ADDRSTRLEN> buffer{};
  inet_ntop(family == 4 ? AF_INET : AF_INET6, address.data(), buffer.data(), buffer.size());
  return buffer.data();
}

std::string SocketAddress::text() const {
  if (family == 0) return "no address";
  return family == 4 ? concat(host_text(), ":", port) : concat("[", host_text(), "]:", port);
}

Socket::Socket(int descriptor) : descriptor_(descriptor) {
  watch_forks();
  const std::lock_guard lock(open_sockets().mutex);
  generation_ = fork_generation();
  open_sockets().descriptors.insert(descriptor_);
}

Socket::Socket(Socket&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), generation_(other.generation_) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this == &other) return *this;
  close();
  descriptor_ = std::exchange(other.descriptor_, -1);
  generation_ = other.generation_;
  return *this;
}

void Socket::close() {
  const int descriptor = std::exchange(descriptor_, -1);
  if (descriptor < 0 || generation_ != fork_generation()) return;  // closed by the fork
  const std::lock_guard lock(open_sockets().mutex);
  open_sockets().descriptors.erase(descriptor);
  ::close(descriptor);
}

std::optional<SocketAddress> parse_address(const std::string& text, int port) {
  SocketAddress address{.family = 4, .port = port, .address = {}};
  if (inet_pton(AF_INET, text.c_str(), address.address.data()) == 1) return address;
  address.family = 6;
  if (inet_pton(AF_INET6, text.c_str(), address.address.data()) == 1) return address;
  return std::nullopt;
}

SocketAddress resolve(const std::string& host, int port) {
  if (const auto numeric = parse_address(host, port)) return *numeric;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const StandardDescriptorGuard guard;  // the resolver opens files and sockets
  const int result = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (result != 0) {
    throw Error(ErrorCode::kCommunication,
                concat("cannot find the host '", host, "': ", gai_strerror(result),
                       "; is MASTER_ADDR spelled correctly?"));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (auto address = from_native(one->ai_addr)) {
      address->port = port;
      return *address;
    }
  }
  throw Error(ErrorCode::kCommunication, concat("the host '", host, "' has no IP address"));
}

std::optional<SocketAddress> local_address_towards(const SocketAddress& target) {
  // Connecting a datagram socket chooses the route and sends nothing.
  const Socket probe = open_socket(target, SOCK_DGRAM);
  SocketAddress with_port = target;
  if (with_port.port == 0) with_port.port = 9;
  const NativeAddress native = to_native(with_port);
  if (::connect(probe.descriptor(), native.get(), native.length) != 0) return std::nullopt;
  SocketAddress local = address_of(probe);
  local.port = 0;
  return local;
}

std::optional<Socket> listen_at(const SocketAddress& address) {
  Socket listener = open_socket(address, SOCK_STREAM);
  const int on = 1;
  setsockopt(listener.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const NativeAddress native = to_native(address);
  if (::bind(listener.descriptor(), native.get(), native.length) != 0) {
    if (errno == EADDRINUSE) return std::nullopt;
    throw_errno(concat("cannot listen on ", address.text()));
  }
  if (::listen(listener.descriptor(), SOMAXCONN) != 0) {
    if (errno == EADDRINUSE) return std::nullopt;
    throw_errno(concat("cannot listen on ", address.text()));
  }
  return listener;
}

SocketAddress address_of(const Socket& socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    throw_errno("cannot read a socket's address");
  }
  return from_native(reinterpret_cast<const sockaddr*>(&storage)).value_or(SocketAddress{});
}

Socket start_connecting(const SocketAddress& target, int& error) {
  const int descriptor = open_descriptor(target, SOCK_STREAM);
  if (descriptor < 0) {
    error = errno;
    return {};
  }
  Socket socket(descriptor);
  set_connection_options(socket);
  const NativeAddress native = to_native(target);
  error = ::connect(socket.descriptor(), native.get(), native.length) == 0 ? 0 : errno;
  if (error == EINPROGRESS || error == EINTR) error = 0;
  return socket;
}

int connect_error(const Socket& socket) {
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

std::optional<Socket> accept_from(const Socket& listener) {
  const int descriptor = above_standard(
      accept4(listener.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (descriptor < 0) return std::nullopt;
  Socket socket(descriptor);
  set_connection_options(socket);
  return socket;
}

bool is_temporary(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

void set_connection_options(const Socket& socket) {
  const auto set = [&](int level, int option, int value) {
    setsockopt(socket.descriptor(), level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
}

namespace {

// A documentation address (RFC 5737): reached by the default route; nothing is sent to it.
constexpr const char* kSomewhereElse = "192.0.2.1";

SocketAddress default_interface() {
  if (const auto local = local_address_towards(*parse_address(kSomewhereElse, 0))) return *local;
  return *parse_address("127.0.0.1", 0);
}

}  // namespace

SocketAddress address_of_host(const std::string& host, int port) {
  SocketAddress address = resolve(host, port);
  // /etc/hosts may give a machine's own name a loopback address that the others cannot reach.
  const bool is_alias = address.is_loopback() && host != "localhost" && !parse_address(host, 0);
  if (!is_alias) return address;
  address = default_interface();
  address.port = port;
  return address;
}

SocketAddress interface_towards(const std::string& host) {
  if (const auto local = local_address_towards(address_of_host(host, 0))) return *local;
  return default_interface();
}

SocketAddress address_to_listen_at(const std::string& address) {
  const std::string given =
      address.empty() ? environment_variable("CROSSDOCK_SOCKETS_ADDRESS") : address;
  if (!given.empty()) {
    const auto parsed = parse_address(given, 0);
    CROSSDOCK_CHECK(parsed.has_value(), "the address to listen on must be numeric, such as ",
                    "10.0.0.1, got '", given, "'");
    return *parsed;
  }
  const std::string master = environment_variable("MASTER_ADDR");
  if (!master.empty()) return interface_towards(master);
  return default_interface();
}

}  // namespace crossdock::comm
