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

}  // namespace crossdock
