#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "comm/secret.hpp"
#include "core/descriptor.hpp"

namespace crossdock::comm {

/// Where a process accepts connections to pass file descriptors through: plain data for the other
/// processes of its machine.
struct DescriptorAddress {
  Secret name{};    // of its socket
  Secret secret{};  // whoever connects must know this; others can see the name
};

/// A connection between two processes of one machine and one user.
class DescriptorConnection {
 public:
  /// Does not wait. Throws Error(kCommunication) if nobody listens at the address, as from within
  /// another network namespace.
  explicit DescriptorConnection(const DescriptorAddress& address);
  explicit DescriptorConnection(Descriptor connected) : socket_(std::move(connected)) {}

  enum class Sending : uint8_t {
    kDone,
    kLater,  // the receiver must read first
    kGone    // the receiver has closed the connection
  };
  /// Sends a copy of a descriptor, and a number that says what it is. Does not wait.
  Sending send(const Descriptor& descriptor, int64_t number) const;
  /// Whether the other side has closed the connection.
  bool is_closed() const;

  struct Received {
    Descriptor descriptor;
    int64_t number = 0;
  };
  /// The next descriptor. Throws Error(kCommunication) if none comes within the timeout.
  Received receive(std::chrono::nanoseconds timeout) const;

 private:
  friend class DescriptorListener;

  Descriptor socket_;
};

/// Accepts connections at a socket without a file, so that nothing is left behind.
class DescriptorListener {
 public:
  /// Throws Error(kUnsupported) if the system does not allow it.
  DescriptorListener();

  const DescriptorAddress& address() const { return address_; }
  /// New connections of processes that know the secret. Does not wait.
  std::vector<DescriptorConnection> accept();

 private:
  DescriptorAddress address_;
  Descriptor socket_;
  std::vector<DescriptorConnection> waiting_;  // for the secret
};

}  // namespace crossdock::comm
