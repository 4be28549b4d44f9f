#include "core/block_ledger.hpp"

#include <algorithm>
#include <iterator>

namespace crossdock {
namespace {

constexpr int64_t kSlack = 16;  // one sixteenth of a request, or of the peak need, may be wasted

}  // namespace

BlockLedger::Grant BlockLedger::take(int64_t wanted_bytes, BlockUse use) {
  needed_ += wanted_bytes;
  most_needed_ = std::max(most_needed_, needed_);
  const auto found = free_.lower_bound(wanted_bytes);
  const int64_t most_bytes = wanted_bytes + wanted_bytes / kSlack;
  if (found != free_.end() && (use == BlockUse::kScratch || *found <= most_bytes)) {
    const int64_t block_bytes = *found;
    free_.erase(found);
    in_use_ += block_bytes;
    return {.block_bytes = block_bytes};
  }
  Grant grant{.block_bytes = wanted_bytes, .is_new = true};
  while (!free_.empty() && held_ + wanted_bytes > most_needed_ + most_needed_ / kSlack) {
    // Prefer a block that is slightly too small: it has been outgrown.
    auto nearest = free_.lower_bound(wanted_bytes);
    if (nearest != free_.begin()) --nearest;
    grant.dropped.push_back(*nearest);
    held_ -= *nearest;
    free_.erase(nearest);
  }
  held_ += wanted_bytes;
  in_use_ += wanted_bytes;
  return grant;
}

void BlockLedger::give_back(int64_t block_bytes, int64_t wanted_bytes) {
  needed_ -= wanted_bytes;
  in_use_ -= block_bytes;
  free_.insert(block_bytes);
}

void BlockLedger::cancel(int64_t block_bytes, int64_t wanted_bytes) {
  needed_ -= wanted_bytes;
  in_use_ -= block_bytes;
  held_ -= block_bytes;
}

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
