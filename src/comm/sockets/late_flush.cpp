#include "comm/sockets/late_flush.hpp"

#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/deadlines.hpp"

namespace crossdock::comm {
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
