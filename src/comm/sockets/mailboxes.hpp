#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>

#include "comm/control_message.hpp"
#include "comm/sockets/node_memory.hpp"

namespace crossdock::comm {

/// Streams of bytes and control messages between the ranks of one node, in their memory files.
///
/// Used by one thread at a time, except that another thread may call send_control concurrently.
class Mailboxes {
 public:
  /// `memory` must outlive this.
  explicit Mailboxes(NodeMemory& memory) : memory_(memory) {}

  /// Sends as many of these bytes, from the first, as there is room for; returns their number.
  size_t write(int member, std::span<const std::byte> bytes);
  /// Takes bytes that have arrived; returns their number.
  size_t read(int member, std::span<std::byte> bytes);
  /// Copies bytes that have arrived and leaves them there. Returns whether there were enough.
  bool peek(int member, std::span<std::byte> bytes) const;

  /// Drops a question or an answer if the mailbox is full: the receiver is then not in a call.
  /// There is always room for an abort and a goodbye.
  void send_control(int member, const ControlMessage& message);
  /// Whether any member has sent a control message since the last call.
  bool has_new_control();
  std::optional<ControlMessage> take_control(int member);

 private:
  NodeMemory& memory_;
  std::mutex control_mutex_;
  uint64_t messages_seen_ = 0;
};

}  // namespace crossdock::comm
