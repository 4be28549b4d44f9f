#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "core/check.hpp"

namespace crossdock {

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
