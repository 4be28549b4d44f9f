#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "comm/control_message.hpp"

namespace crossdock::comm {

/// The stream of bytes between this process and one far peer, in one communicator. The sender may
/// be at most window_bytes ahead of what the receiver has consumed. This bounds the receiver's
/// memory, and control frames never wait behind data that nobody reads.
class FarStream {
 public:
  explicit FarStream(int64_t window_bytes) : window_bytes_(static_cast<uint64_t>(window_bytes)) {}

  /// Bytes that may be sent now.
  uint64_t credit() const { return window_bytes_ - (num_sent_ - num_acknowledged_); }
  uint64_t num_sent() const { return num_sent_; }
  void note_sent(size_t num_bytes) { num_sent_ += num_bytes; }
  /// False if the peer cannot have consumed that much.
  bool note_consumed_by_peer(uint64_t position);

  /// False if the bytes are not the next of the stream, or more than the peer may send.
  bool receive(uint64_t position, std::span<const std::byte> bytes);
  bool has_unread() const { return num_received_ > num_consumed_; }
  size_t read(std::byte* out, size_t max_bytes);
  /// Whether the peer should be told how much has been consumed: at every quarter of the window.
  bool owes_credit() const { return num_consumed_ - num_credited_ >= (window_bytes_ + 3) / 4; }
  uint64_t credit_position() { return num_credited_ = num_consumed_; }

 private:
  uint64_t window_bytes_;
  uint64_t num_sent_ = 0;
  uint64_t num_acknowledged_ = 0;
  uint64_t num_received_ = 0;
  uint64_t num_consumed_ = 0;
  uint64_t num_credited_ = 0;
  std::vector<std::byte> unread_;  // begins with unread_begin_ bytes that have been read
  size_t unread_begin_ = 0;
};

/// Bytes and messages that far peers have sent to one communicator and that have not been taken
/// yet.
struct ChannelInbox {
  bool is_open = false;  // false: a peer was faster than this process in making the communicator
  std::map<int, FarStream> streams;  // by rank in the world of the blobs
  std::deque<std::pair<int, ControlMessage>> messages;

  FarStream& stream(int peer, int64_t window_bytes) {
    return streams.try_emplace(peer, window_bytes).first->second;
  }
};

}  // namespace crossdock::comm
