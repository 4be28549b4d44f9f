#include "comm/sockets/node_streams.hpp"

#include <algorithm>
#include <cstring>

namespace crossdock::comm {

void Posts::publish(uint64_t exchange, std::span<const std::byte> bytes) {
  ++number_;
  Post& post = memory_.head(memory_.self()).posts[number_ % 2];
  post.exchange = exchange;
  post.num_bytes = bytes.size();
  if (!bytes.empty()) std::memcpy(post.bytes.data(), bytes.data(), bytes.size());
  post.number.store(number_, std::memory_order_release);
  memory_.wake_for_post();
}

const Post* Posts::find(int member) const {
  return find_number(member, number_);
}

const Post* Posts::find_next(int member) const {
  return find_number(member, number_ + 1);
}

const Post* Posts::find_number(int member, uint64_t number) const {
  const Post& post = memory_.head(member).posts[number % 2];
  return post.number.load(std::memory_order_acquire) == number ? &post : nullptr;
}

size_t NodeStreams::write(int member, std::span<const std::byte> bytes) {
  StreamHead& box = memory_.stream(member, memory_.self());
  std::byte* ring = memory_.ring(member, memory_.self());
  const size_t ring_bytes = memory_.ring_bytes();
  const uint64_t written = box.bytes_written.load(std::memory_order_relaxed);
  const uint64_t read = box.bytes_read.load(std::memory_order_acquire);
  const size_t num_bytes = std::min<size_t>(bytes.size(), ring_bytes - (written - read));
  if (num_bytes == 0) return 0;
  const size_t begin = written % ring_bytes;
  const size_t before_wrap = std::min(num_bytes, ring_bytes - begin);
  std::memcpy(ring + begin, bytes.data(), before_wrap);
  std::memcpy(ring, bytes.data() + before_wrap, num_bytes - before_wrap);
  box.bytes_written.store(written + num_bytes, std::memory_order_release);
  memory_.wake(member);
  return num_bytes;
}

size_t NodeStreams::read(int member, std::span<std::byte> bytes) {
  StreamHead& box = memory_.stream(memory_.self(), member);
  const std::byte* ring = memory_.ring(memory_.self(), member);
  const size_t ring_bytes = memory_.ring_bytes();
  const uint64_t read = box.bytes_read.load(std::memory_order_relaxed);
  const uint64_t written = box.bytes_written.load(std::memory_order_acquire);
  const size_t num_bytes = std::min<size_t>(bytes.size(), written - read);
  if (num_bytes == 0) return 0;
  const size_t begin = read % ring_bytes;
  const size_t before_wrap = std::min(num_bytes, ring_bytes - begin);
  std::memcpy(bytes.data(), ring + begin, before_wrap);
  std::memcpy(bytes.data() + before_wrap, ring, num_bytes - before_wrap);
  box.bytes_read.store(read + num_bytes, std::memory_order_release);
  // The sender waits for room only after it has filled the ring. The fence orders the store before
  // the load: either this rank sees the full ring or the sender sees the room.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (box.bytes_written.load(std::memory_order_relaxed) - read == ring_bytes) memory_.wake(member);
  return num_bytes;
}

bool NodeStreams::peek(int member, std::span<std::byte> bytes) const {
  const StreamHead& box = memory_.stream(memory_.self(), member);
  const std::byte* ring = memory_.ring(memory_.self(), member);
  const uint64_t read = box.bytes_read.load(std::memory_order_relaxed);
  if (box.bytes_written.load(std::memory_order_acquire) - read < bytes.size()) return false;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = ring[(read + i) % memory_.ring_bytes()];
  return true;
}

void NodeStreams::send_control(int member, const ControlMessage& message) {
  constexpr uint64_t kReserved = 2;  // for an abort and a goodbye, each sent at most once
  const std::lock_guard lock(control_mutex_);
  StreamHead& box = memory_.stream(member, memory_.self());
  const uint64_t written = box.messages_written.load(std::memory_order_relaxed);
  const uint64_t unread = written - box.messages_read.load(std::memory_order_acquire);
  const bool is_last_word =
      message.kind == ControlMessage::Kind::kAbort || message.kind == ControlMessage::Kind::kLeft;
  if (unread >= StreamHead::kNumMessages - (is_last_word ? 0 : kReserved)) return;
  box.messages[written % StreamHead::kNumMessages] = message;
  box.messages_written.store(written + 1, std::memory_order_release);
  memory_.head(member).messages_to_me.fetch_add(1, std::memory_order_release);
  memory_.wake(member);
}

bool NodeStreams::has_new_control() {
  const uint64_t sent = memory_.head(memory_.self()).messages_to_me.load(std::memory_order_acquire);
  if (sent == messages_seen_) return false;
  messages_seen_ = sent;
  return true;
}

std::optional<ControlMessage> NodeStreams::take_control(int member) {
  StreamHead& box = memory_.stream(memory_.self(), member);
  const uint64_t read = box.messages_read.load(std::memory_order_relaxed);
  if (read == box.messages_written.load(std::memory_order_acquire)) return std::nullopt;
  const ControlMessage message = box.messages[read % StreamHead::kNumMessages];
  box.messages_read.store(read + 1, std::memory_order_release);
  return message;
}

}  // namespace crossdock::comm
