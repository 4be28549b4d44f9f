#pragma once

#include <cstdint>
#include <set>
#include <vector>

namespace crossdock {

/// How long a block will be used.
enum class BlockUse : uint8_t {
  kResult,  // passed to the caller, or kept
  kScratch  // released before the operation ends
};

/// The blocks of a pool, as sizes without memory, so the planner can predict what a run holds.
///
/// A request takes the smallest free block that is large enough. A result takes it only if little
/// is wasted, because it may occupy a large block for a long time; scratch takes any. Otherwise a
/// new block is made, and free blocks are dropped, those nearest in size first, until the pool
/// holds no more than was ever needed at once (plus some slack). The bytes held therefore do not
/// depend on the order of sizes and do not accumulate.
class BlockLedger {
 public:
  struct Grant {
    int64_t block_bytes = 0;
    bool is_new = false;
    std::vector<int64_t> dropped{};  // blocks that leave the pool
  };

  /// REQUIRES: wanted_bytes > 0.
  Grant take(int64_t wanted_bytes, BlockUse use);
  /// REQUIRES: the block_bytes and wanted_bytes of a take.
  void give_back(int64_t block_bytes, int64_t wanted_bytes);
  /// Undoes a take whose new block could not be allocated. REQUIRES: as give_back.
  void cancel(int64_t block_bytes, int64_t wanted_bytes);

  int64_t bytes_in_use() const { return in_use_; }  // of blocks
  int64_t bytes_held() const { return held_; }

 private:
  std::multiset<int64_t> free_;
  int64_t in_use_ = 0;
  int64_t held_ = 0;
  int64_t needed_ = 0;  // sum of the bytes wanted now
  int64_t most_needed_ = 0;
};

}  // namespace crossdock
