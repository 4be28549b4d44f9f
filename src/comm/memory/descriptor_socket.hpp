#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "core/descriptor.hpp"

namespace crossdock::comm {

using Secret = std::array<std::byte, 16>;

/// Random bytes from the kernel.
Secret make_secret();
/// Compares in constant time.
bool is_equal(const Secret& a, const Secret& b);

/// Where a process accepts connections to pass file descriptors through: plain data for the other
/// processes on its machine.
struct DescriptorAddress {
  Secret name{};    // of its socket
  Secret secret{};  // needed to connect; the name is visible to others
};

/// Says what a descriptor is: plain data, sent with it.
struct DescriptorLabel {
  int64_t index = 0;
  int64_t num_bytes = 0;  // of the memory behind the descriptor
};

/// The receiver's answer to a descriptor: plain data.
struct DescriptorReceipt {
  int64_t index = 0;                // of its label
  std::array<char, 256> failure{};  // why the receiver cannot use it; empty: it can

  /// The reason is truncated if it is long.
  static DescriptorReceipt of_failure(int64_t index, std::string_view reason);
  std::string_view reason() const { return failure.data(); }
};

/// A connection between two processes of one user on one machine. Descriptors go one way, receipts
/// the other. No call waits.
class DescriptorConnection {
 public:
  /// Throws Error(kCommunication) if nobody listens at the address, e.g. from within another
  /// network namespace.
  explicit DescriptorConnection(const DescriptorAddress& address);
  explicit DescriptorConnection(Descriptor connected) : socket_(std::move(connected)) {}

  enum class Sending : uint8_t {
    kDone,
    kLater,  // the receiver must read first
    kGone    // the receiver has closed the connection
  };
  /// Sends a copy of a descriptor.
  Sending send(const Descriptor& descriptor, DescriptorLabel label) const;
  Sending send_receipt(const DescriptorReceipt& receipt) const;

  struct Received {
    Descriptor passed;
    DescriptorLabel label;
    /// The descriptor. Throws Error(kCommunication) if the system withheld it.
    const Descriptor& descriptor() const;
  };
  /// The next descriptor, if one has arrived. Throws Error(kCommunication) once the sender has
  /// closed the connection and everything it sent has been received.
  std::optional<Received> receive() const;
  /// The next receipt, if one has arrived.
  std::optional<DescriptorReceipt> receive_receipt() const;

  /// Whether the other side has closed the connection.
  bool is_closed() const;
  /// For poll.
  int socket() const { return socket_.number(); }

 private:
  friend class DescriptorListener;

  Descriptor socket_;
};

/// Accepts connections on a socket without a file, so nothing is left behind.
class DescriptorListener {
 public:
  /// Throws Error(kUnsupported) if the system does not allow it.
  DescriptorListener();

  const DescriptorAddress& address() const { return address_; }
  /// New connections from processes that know the secret. Does not wait.
  std::vector<DescriptorConnection> accept();

 private:
  DescriptorAddress address_;
  Descriptor socket_;
  std::vector<DescriptorConnection> waiting_;  // for the secret
};

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
