#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/polled/transfers.hpp"
#include "comm/sockets/links.hpp"

namespace crossdock::comm {

/// Precedes the bytes of a block, to detect a disagreement between ranks.
struct BlockLabel {
  uint64_t exchange = 0;
  int64_t num_bytes = 0;
};
/// Throws kInternal, with `peer` as culprit, unless the block that arrived from it is the expected
/// one.
void check_block(int peer, const BlockLabel& arrived, const BlockLabel& expected);
/// The same for a block sent over a stream where a post was expected, or vice versa.
[[noreturn]] void throw_other_exchange(int peer, const BlockLabel& arrived);

/// The blocks of one exchange. A block is a BlockLabel and its bytes, written to its receiver's
/// stream as room allows, and read from there; blocks without bytes are not sent. Ranks take turns
/// in the order of their distance, one chunk or ring at a time.
class SocketsTransfers final : public Transfers {
 public:
  /// `links` must outlive this.
  SocketsTransfers(const std::vector<PeerBytes>& peer_bytes, uint64_t exchange, Links& links);

  bool is_done() const override { return num_incomplete_ == 0; }
  bool advance() override;
  bool is_pending(int peer) const override;
  bool has_arrived(int peer) const override;
  int size() const override { return static_cast<int>(blocks_.size()); }

 private:
  static constexpr int64_t kLabelBytes = sizeof(BlockLabel);
  static constexpr int64_t kWithLabelBytes = 512;

  struct Blocks {  // to and from one peer
    PeerBytes bytes;
    int64_t sent = 0;      // bytes of label and block
    bool is_sent = false;  // all bytes are sent, and none are kept here
    int64_t received = 0;  // bytes of label and block
    BlockLabel arriving;

    int64_t send_total() const { return bytes.send_bytes > 0 ? kLabelBytes + bytes.send_bytes : 0; }
    int64_t recv_total() const { return bytes.recv_bytes > 0 ? kLabelBytes + bytes.recv_bytes : 0; }
  };

  void check_for_posts() const;
  bool is_sent(int peer) const;
  bool send_some(int peer);
  bool receive_some(int peer);
  Links& links_;
  const uint64_t exchange_;
  std::vector<Blocks> blocks_;  // [P]; this rank's own is empty
  int num_incomplete_ = 0;      // blocks, sent and received counted separately
};

/// The blocks of an all-gather of small blocks on one node: every rank posts its block and reads
/// the others'. Reused for every exchange, so exchanges allocate nothing.
class PostedTransfers final : public Transfers {
 public:
  /// `links` must outlive this and have posts.
  explicit PostedTransfers(Links& links);

  /// Whether blocks with these offsets [P + 1] fit into posts.
  static bool fits(std::span<const int64_t> recv_offsets);

  struct Args {
    uint64_t exchange = 0;
    std::span<const std::byte> send;
    std::byte* recv = nullptr;
    std::span<const int64_t> recv_offsets;  // [P + 1]
  };
  /// Begins the next exchange. The memory in `args` must be valid until the exchange has ended.
  void begin(const Args& args);

  bool is_done() const override { return missing_.empty(); }
  bool advance() override;
  bool is_pending(int peer) const override;
  bool has_arrived(int peer) const override { return !is_pending(peer); }
  int size() const override { return links_.size(); }

 private:
  bool read_posts();
  void check_for_streams() const;

  Links& links_;
  Args args_;
  bool is_published_ = false;
  std::vector<int> missing_;  // peers whose posts have not been read
};

}  // namespace crossdock::comm
