#include "comm/sockets/transfers.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "comm/memory/bell.hpp"
#include "core/check.hpp"

namespace crossdock::comm {

void check_block(int peer, const BlockLabel& arrived, const BlockLabel& expected) {
  if (arrived.exchange == expected.exchange && arrived.num_bytes == expected.num_bytes) return;
  throw Error(ErrorCode::kInternal,
              concat("rank ", peer, " sent a message of ", arrived.num_bytes, " bytes in exchange ",
                     arrived.exchange, " where ", expected.num_bytes, " were expected in exchange ",
                     expected.exchange),
              {.culprit = peer});
}

void throw_other_exchange(int peer, const BlockLabel& arrived) {
  throw Error(ErrorCode::kInternal,
              concat("rank ", peer, " sent a message of ", arrived.num_bytes,
                     " bytes in a different exchange from this rank's, number ", arrived.exchange),
              {.culprit = peer});
}

SocketsTransfers::SocketsTransfers(const std::vector<PeerBytes>& peer_bytes, uint64_t exchange,
                                   Links& links)
    : links_(links), exchange_(exchange), blocks_(peer_bytes.size()) {
  blocks_[static_cast<size_t>(links_.rank())].is_sent = true;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == links_.rank()) continue;
    Blocks& blocks = blocks_[static_cast<size_t>(peer)];
    blocks.bytes = peer_bytes[static_cast<size_t>(peer)];
    blocks.is_sent = blocks.bytes.send_bytes == 0;
    num_incomplete_ +=
        (blocks.bytes.send_bytes > 0 ? 1 : 0) + (blocks.bytes.recv_bytes > 0 ? 1 : 0);
    if (is_pending(peer)) links_.expect(peer);
  }
}

bool SocketsTransfers::is_pending(int peer) const {
  const Blocks& blocks = blocks_[static_cast<size_t>(peer)];
  return blocks.received < blocks.recv_total() || !is_sent(peer);
}

bool SocketsTransfers::is_sent(int peer) const {
  const Blocks& blocks = blocks_[static_cast<size_t>(peer)];
  return blocks.is_sent || (blocks.sent == blocks.send_total() && links_.is_flushed(peer));
}

bool SocketsTransfers::has_arrived(int peer) const {
  return blocks_[static_cast<size_t>(peer)].received > 0;
}

bool SocketsTransfers::advance() {
  links_.poll();
  bool moved = false;
  for (int distance = 1; distance < size(); ++distance) {
    moved |= send_some((links_.rank() + distance) % size());
    moved |= receive_some((links_.rank() - distance + size()) % size());
  }
  if (!moved) check_for_posts();
  return moved;
}

// Throws if a peer posts its block of this exchange: it will never use a stream.
void SocketsTransfers::check_for_posts() const {
  const Posts* posts = links_.posts();
  for (int peer = 0; posts != nullptr && peer < size(); ++peer) {
    if (!is_pending(peer)) continue;
    const Post* post = posts->find_next(peer);
    if (post == nullptr || post->exchange > exchange_) continue;
    throw_other_exchange(
        peer, {.exchange = post->exchange, .num_bytes = static_cast<int64_t>(post->num_bytes)});
  }
}

bool SocketsTransfers::send_some(int peer) {
  Blocks& blocks = blocks_[static_cast<size_t>(peer)];
  if (blocks.is_sent) return false;
  const int64_t before = blocks.sent;
  if (blocks.sent < kLabelBytes) {
    // The beginning of the block is sent with the label: a small block needs a single message.
    std::array<std::byte, kLabelBytes + kWithLabelBytes> head;
    const BlockLabel label{.exchange = exchange_, .num_bytes = blocks.bytes.send_bytes};
    const auto num_bytes = static_cast<size_t>(std::min(blocks.bytes.send_bytes, kWithLabelBytes));
    std::memcpy(head.data(), &label, sizeof label);
    std::memcpy(head.data() + sizeof label, blocks.bytes.send, num_bytes);
    const auto bytes = std::span(head).first(sizeof label + num_bytes);
    blocks.sent +=
        static_cast<int64_t>(links_.write(peer, bytes.subspan(static_cast<size_t>(blocks.sent))));
  }
  if (blocks.sent >= kLabelBytes && blocks.sent < blocks.send_total()) {
    const int64_t done = blocks.sent - kLabelBytes;
    blocks.sent += static_cast<int64_t>(links_.write(
        peer, {blocks.bytes.send + done, static_cast<size_t>(blocks.bytes.send_bytes - done)}));
  }
  if (is_sent(peer)) {
    blocks.is_sent = true;
    --num_incomplete_;
  }
  return blocks.sent > before || blocks.is_sent;
}

bool SocketsTransfers::receive_some(int peer) {
  Blocks& blocks = blocks_[static_cast<size_t>(peer)];
  if (blocks.received == blocks.recv_total()) return false;
  const int64_t before = blocks.received;
  if (blocks.received < kLabelBytes) {
    const auto bytes =
        std::as_writable_bytes(std::span(&blocks.arriving, 1)).subspan(static_cast<size_t>(before));
    blocks.received += static_cast<int64_t>(links_.read(peer, bytes));
    if (blocks.received == kLabelBytes) {
      check_block(peer, blocks.arriving,
                  {.exchange = exchange_, .num_bytes = blocks.bytes.recv_bytes});
    }
  }
  if (blocks.received >= kLabelBytes) {
    const int64_t done = blocks.received - kLabelBytes;
    blocks.received += static_cast<int64_t>(links_.read(
        peer, {blocks.bytes.recv + done, static_cast<size_t>(blocks.bytes.recv_bytes - done)}));
  }
  if (blocks.received == blocks.recv_total()) --num_incomplete_;
  return blocks.received > before;
}

namespace {

constexpr int kNumLooks = 100;  // for missing posts, before the caller checks for failures

}  // namespace

PostedTransfers::PostedTransfers(Links& links) : links_(links) {
  missing_.reserve(static_cast<size_t>(links.size()));
}

bool PostedTransfers::fits(std::span<const int64_t> recv_offsets) {
  const auto is_large = [](int64_t begin, int64_t end) {
    return end - begin > static_cast<int64_t>(Post::kMaxBytes);
  };
  return std::adjacent_find(recv_offsets.begin(), recv_offsets.end(), is_large) ==
         recv_offsets.end();
}

void PostedTransfers::begin(const Args& args) {
  args_ = args;
  is_published_ = false;
  missing_.clear();
  for (int distance = 1; distance < size(); ++distance) {
    missing_.push_back((links_.rank() + distance) % size());
  }
}

bool PostedTransfers::is_pending(int peer) const {
  return std::find(missing_.begin(), missing_.end(), peer) != missing_.end();
}

bool PostedTransfers::advance() {
  if (!is_published_) links_.posts()->publish(args_.exchange, args_.send);
  is_published_ = true;
  bool moved = read_posts();
  for (int look = 1; look < kNumLooks && !is_done() && links_.may_spin(); ++look) {
    spin_once();
    moved |= read_posts();
  }
  if (is_done()) return true;
  if (!moved) check_for_streams();
  links_.await_post_of(missing_.front());
  return moved;
}

// Throws if a peer uses a stream for this exchange: it will never post. A peer that has already
// finished this exchange may be streaming the next.
void PostedTransfers::check_for_streams() const {
  for (const int peer : missing_) {
    BlockLabel label;
    const bool is_there = links_.peek(peer, std::as_writable_bytes(std::span(&label, 1)));
    if (is_there && label.exchange <= args_.exchange) throw_other_exchange(peer, label);
  }
}

bool PostedTransfers::read_posts() {
  const size_t num_before = missing_.size();
  std::erase_if(missing_, [&](int peer) {
    const Post* post = links_.posts()->find(peer);
    if (post == nullptr) return false;
    const int64_t begin = args_.recv_offsets[static_cast<size_t>(peer)];
    const int64_t num_bytes = args_.recv_offsets[static_cast<size_t>(peer) + 1] - begin;
    check_block(peer,
                {.exchange = post->exchange, .num_bytes = static_cast<int64_t>(post->num_bytes)},
                {.exchange = args_.exchange, .num_bytes = num_bytes});
    if (num_bytes > 0) {
      std::memcpy(args_.recv + begin, post->bytes.data(), static_cast<size_t>(num_bytes));
    }
    return true;
  });
  return missing_.size() < num_before;
}

}  // namespace crossdock::comm
