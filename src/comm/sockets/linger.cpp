#include "comm/sockets/linger.hpp"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/waiting.hpp"
#include "core/process.hpp"

namespace crossdock::comm {
namespace {

constexpr std::chrono::seconds kExitTime{2};

struct Lingering {
  std::mutex mutex;
  std::vector<Socket> sockets;
};

constinit PerProcess<Lingering> lingering;

// Discards what has arrived. Returns whether the peer has closed its end.
bool is_closed_by_peer(const Socket& socket) {
  std::array<std::byte, 4096> discarded{};
  while (true) {
    const ssize_t got = recv(socket.descriptor(), discarded.data(), discarded.size(), MSG_DONTWAIT);
    if (got > 0) continue;
    return got == 0 || !is_temporary(errno);
  }
}

// Whether the peer's machine has all bytes.
bool is_delivered(const Socket& socket) {
  int num_unsent = 0;
  return ioctl(socket.descriptor(), SIOCOUTQ, &num_unsent) != 0 || num_unsent == 0;
}

void finish_at_exit() {
  Lingering& all = lingering.get();
  const std::lock_guard lock(all.mutex);
  auto& kept = all.sockets;
  const auto end = Clock::now() + kExitTime;
  const auto is_finished = [](const Socket& socket) {
    return is_closed_by_peer(socket) || is_delivered(socket);
  };
  while (std::erase_if(kept, is_finished), !kept.empty() && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void close_gently(std::vector<Socket> sockets) {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(finish_at_exit); });
  for (const Socket& socket : sockets) shutdown(socket.descriptor(), SHUT_WR);
  Lingering& all = lingering.get();
  const std::lock_guard lock(all.mutex);
  auto& kept = all.sockets;
  kept.insert(kept.end(), std::make_move_iterator(sockets.begin()),
              std::make_move_iterator(sockets.end()));
  std::erase_if(kept, is_closed_by_peer);
}

namespace {

constexpr std::chrono::seconds kFlushTime{10};
constexpr std::chrono::milliseconds kLook{10};

void flush(Endpoint& endpoint) {
  const auto end = Clock::now() + kFlushTime;
  while (endpoint.has_unsent() && Clock::now() < end) {
    endpoint.wait_for_sockets(kLook);
    endpoint.poll();
  }
}

}  // namespace

void flush_in_background(std::shared_ptr<Endpoint> endpoint) {
  if (!endpoint->has_unsent()) return;
  try {
    std::thread([endpoint = std::move(endpoint)] {
      try {
        flush(*endpoint);
      } catch (const std::exception&) {
        // The peers find out by their deadlines.
      }
    }).detach();
  } catch (const std::system_error&) {
    // Without a thread the peers find out by their deadlines.
  }
}

}  // namespace crossdock::comm
