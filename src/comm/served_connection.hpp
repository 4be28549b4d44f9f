#pragma once

#include <functional>
#include <optional>

#include "comm/descriptor_socket.hpp"

namespace crossdock::comm {

/// A connection whose descriptors are received as they arrive, even while all other threads of this
/// process are blocked. One service thread serves all connections; it is started with the first
/// one, blocks all signals, and ends with the process.
class ServedConnection {
 public:
  /// Called by the service thread. They must not destroy a ServedConnection.
  struct Handlers {
    /// Takes over a descriptor. If it throws, the error is sent to the sender as the reason why the
    /// descriptor cannot be used; otherwise the sender learns that it can.
    std::function<void(const DescriptorConnection::Received&)> take;
    /// Called once, when the sender has closed the connection. Must not throw.
    std::function<void()> closed;
  };

  /// Throws Error(kUnsupported) if the service thread cannot be started.
  ServedConnection(DescriptorConnection connection, Handlers handlers);
  /// Waits for a handler that is running; no handler runs afterwards.
  ~ServedConnection();
  ServedConnection(const ServedConnection&) = delete;
  ServedConnection& operator=(const ServedConnection&) = delete;

  /// Whether the sender has closed the connection, even if the service thread has not noticed yet.
  bool is_closed() const { return connection_.is_closed(); }

 private:
  friend class DescriptorService;

  int polled_socket() const { return is_over_ ? -1 : connection_.socket(); }
  short awaited_events() const;
  void serve();
  DescriptorReceipt take(const DescriptorConnection::Received& received);
  void answer();

  DescriptorConnection connection_;
  Handlers handlers_;
  // Used only by the service thread:
  std::optional<DescriptorReceipt> unsent_;  // must be sent before the next descriptor is received
  bool is_over_ = false;                     // the sender has closed the connection
};

}  // namespace crossdock::comm
