#include "comm/sockets/posted_transfers.hpp"

#include <algorithm>
#include <cstring>

#include "comm/futex.hpp"
#include "comm/sockets/transfers.hpp"

namespace crossdock::comm {
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
