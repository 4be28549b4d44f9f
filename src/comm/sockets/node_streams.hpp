#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>

#include "comm/polled/control_message.hpp"
#include "comm/sockets/node_memory.hpp"

namespace crossdock::comm {

/// Small blocks that every rank of a node shows to all others: one write instead of one per rank.
///
/// All members publish equally often. Post n is in slot n % 2 and may be overwritten by post n + 2:
/// no member publishes n + 1 before it has read all posts n, and none publishes n + 2 before it has
/// seen all posts n + 1.
class Posts {
 public:
  /// `memory` must outlive this.
  explicit Posts(NodeMemory& memory) : memory_(memory) {}

  /// Publishes this rank's next post. REQUIRES: bytes.size() <= Post::kMaxBytes, and all posts of
  /// the members before this one have been read.
  void publish(uint64_t exchange, std::span<const std::byte> bytes);
  /// The member's post with the number of this rank's last one; null if it is not there yet.
  const Post* find(int member) const;
  /// The member's next post, if the member is ahead of this rank; else null.
  const Post* find_next(int member) const;

 private:
  const Post* find_number(int member, uint64_t number) const;

  NodeMemory& memory_;
  uint64_t number_ = 0;  // of the last post
};

/// Streams of bytes and control messages between the ranks of one node, in their memory files.
///
/// Used by one thread at a time, except that another thread may call send_control concurrently.
class NodeStreams {
 public:
  /// `memory` must outlive this.
  explicit NodeStreams(NodeMemory& memory) : memory_(memory) {}

  /// Sends as many of these bytes, from the first, as there is room for; returns their number.
  size_t write(int member, std::span<const std::byte> bytes);
  /// Takes bytes that have arrived; returns their number.
  size_t read(int member, std::span<std::byte> bytes);
  /// Copies bytes that have arrived and leaves them there. Returns whether there were enough.
  bool peek(int member, std::span<std::byte> bytes) const;

  /// Drops a question or an answer if the stream is full: the receiver is then not in a call.
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
