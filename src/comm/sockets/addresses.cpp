#include "comm/sockets/addresses.hpp"

#include "core/check.hpp"
#include "core/environment.hpp"

namespace crossdock::comm {
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
