#pragma once

#include <cstdint>
#include <set>
#include <vector>

namespace crossdock {

/// How long a request lasts, as far as the asking code knows.
enum class BlockUse : uint8_t {
  kResult,  // handed on to the caller, or kept
  kScratch  // given back before the operation ends
};

/// Which blocks a pool holds: sizes without memory, so that a plan can count what a run will hold.
///
/// A request takes the smallest free block that fits: a result only if it fits well, for it may
/// keep others from a large block for long; scratch any. Otherwise a new block is made. Then free
/// blocks go, those nearest in size first, until the pool holds no more than was ever needed at
/// once (and some slack): so what is held does not depend on the order of sizes, and does not pile
/// up.
class BlockLedger {
 public:
  struct Grant {
    int64_t block_bytes = 0;
    bool is_new = false;
    std::vector<int64_t> dropped{};  // blocks that leave the pool
  };

  /// REQUIRES: wanted_bytes > 0.
  Grant take(int64_t wanted_bytes, BlockUse use);
  /// REQUIRES: what a take granted and wanted.
  void give_back(int64_t block_bytes, int64_t wanted_bytes);
  /// There was no memory for a new block. REQUIRES: likewise.
  void cancel(int64_t block_bytes, int64_t wanted_bytes);

  int64_t bytes_in_use() const { return in_use_; }  // of blocks
  int64_t bytes_held() const { return held_; }

 private:
  std::multiset<int64_t> free_;
  int64_t in_use_ = 0;
  int64_t held_ = 0;
  int64_t needed_ = 0;  // sum of what is wanted now
  int64_t most_needed_ = 0;
};

}  // namespace crossdock
