#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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

}  // namespace crossdock::comm
