#include "core/free_ranges.hpp"

#include <iterator>

namespace crossdock {

void FreeRanges::add(int64_t offset, int64_t num_bytes) {
  parts_.emplace(offset, num_bytes);
  by_size_.emplace(num_bytes, offset);
}

void FreeRanges::remove(Parts::iterator part) {
  by_size_.erase({part->second, part->first});
  parts_.erase(part);
}

std::optional<int64_t> FreeRanges::take(int64_t num_bytes) {
  const auto found = by_size_.lower_bound({num_bytes, 0});
  if (found == by_size_.end()) return std::nullopt;
  const auto [part_bytes, offset] = *found;
  remove(parts_.find(offset));
  if (part_bytes > num_bytes) add(offset + num_bytes, part_bytes - num_bytes);
  return offset;
}

void FreeRanges::give_back(int64_t offset, int64_t num_bytes) {
  const auto after = parts_.lower_bound(offset);
  if (after != parts_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      num_bytes += before->second;
      remove(before);
    }
  }
  if (after != parts_.end() && after->first == offset + num_bytes) {
    num_bytes += after->second;
    remove(after);
  }
  add(offset, num_bytes);
}

int64_t FreeRanges::bytes_before(int64_t end) const {
  const auto after = parts_.lower_bound(end);
  if (after == parts_.begin()) return 0;
  const auto& [offset, num_bytes] = *std::prev(after);
  return offset + num_bytes == end ? num_bytes : 0;
}

}  // namespace crossdock
