#include "cli/processes/free_port.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace crossdock::cli {

int find_free_port() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (probe < 0) return 0;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const bool is_bound =
      bind(probe, generic, length) == 0 && getsockname(probe, generic, &length) == 0;
  close(probe);
  return is_bound ? ntohs(address.sin_port) : 0;
}

}  // namespace crossdock::cli
