#include "comm/sockets/posts.hpp"

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

}  // namespace crossdock::comm
