#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/secret.hpp"
#include "core/descriptor.hpp"

namespace crossdock::comm {

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

}  // namespace crossdock::comm
