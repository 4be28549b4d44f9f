#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <type_traits>
#include <vector>

#include "core/check.hpp"
#include "crossdock/group.hpp"

namespace crossdock {

/// Plain data as the body of a Proposal. Valid as long as the item.
template <typename Item>
std::span<const std::byte> body_of(const Item& item) {
  static_assert(std::is_trivially_copyable_v<Item>);
  return std::as_bytes(std::span(&item, 1));
}
template <typename Item>
std::span<const std::byte> body_of(const Item&& item) = delete;

/// The item of one rank. Does not allocate. REQUIRES: the rank's body was one Item.
template <typename Item>
Item item_of(const Agreement& agreement, int rank) {
  static_assert(std::is_trivially_copyable_v<Item>);
  const std::span<const std::byte> body = agreement.body(rank);
  CROSSDOCK_ASSERT(body.size() == sizeof(Item));
  Item item{};
  std::memcpy(&item, body.data(), sizeof(Item));
  return item;
}

/// The items of all ranks, [P]. REQUIRES: as for item_of.
template <typename Item>
std::vector<Item> items_of(const Agreement& agreement) {
  std::vector<Item> items;
  for (int rank = 0; rank + 1 < std::ssize(agreement.offsets); ++rank) {
    items.push_back(item_of<Item>(agreement, rank));
  }
  return items;
}

/// Appends plain data to bytes that another rank unpacks.
template <typename Item>
void append_items(std::vector<std::byte>& bytes, const std::vector<Item>& items) {
  static_assert(std::is_trivially_copyable_v<Item>);
  const std::span<const std::byte> added = std::as_bytes(std::span(items));
  bytes.insert(bytes.end(), added.begin(), added.end());
}
template <typename Item>
void append_item(std::vector<std::byte>& bytes, const Item& item) {
  append_items(bytes, std::vector<Item>{item});
}

/// Returns the first `count` items of `bytes` and removes them from it.
template <typename Item>
std::vector<Item> split_items(std::span<const std::byte>& bytes, int64_t count) {
  static_assert(std::is_trivially_copyable_v<Item>);
  std::vector<Item> items(static_cast<size_t>(count));
  const size_t num_bytes = items.size() * sizeof(Item);
  CROSSDOCK_ASSERT(num_bytes <= bytes.size());
  if (num_bytes > 0) std::memcpy(items.data(), bytes.data(), num_bytes);
  bytes = bytes.subspan(num_bytes);
  return items;
}
template <typename Item>
Item split_item(std::span<const std::byte>& bytes) {
  return split_items<Item>(bytes, 1).front();
}

}  // namespace crossdock
