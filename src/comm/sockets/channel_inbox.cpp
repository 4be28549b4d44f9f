#include "comm/sockets/channel_inbox.hpp"

#include <algorithm>
#include <cstring>

namespace crossdock::comm {

bool FarStream::note_consumed_by_peer(uint64_t position) {
  if (position < num_acknowledged_ || position > num_sent_) return false;
  num_acknowledged_ = position;
  return true;
}

bool FarStream::receive(uint64_t position, std::span<const std::byte> bytes) {
  if (position != num_received_) return false;
  if (num_received_ - num_consumed_ + bytes.size() > window_bytes_) return false;
  if (unread_begin_ >= window_bytes_) {  // keeps it to at most two windows
    unread_.erase(unread_.begin(), unread_.begin() + static_cast<ptrdiff_t>(unread_begin_));
    unread_begin_ = 0;
  }
  unread_.insert(unread_.end(), bytes.begin(), bytes.end());
  num_received_ += bytes.size();
  return true;
}

size_t FarStream::read(std::byte* out, size_t max_bytes) {
  const size_t num_bytes = std::min<size_t>(max_bytes, num_received_ - num_consumed_);
  if (num_bytes == 0) return 0;
  std::memcpy(out, unread_.data() + unread_begin_, num_bytes);
  unread_begin_ += num_bytes;
  if (unread_begin_ == unread_.size()) {
    unread_.clear();
    unread_begin_ = 0;
  }
  num_consumed_ += num_bytes;
  return num_bytes;
}

}  // namespace crossdock::comm
