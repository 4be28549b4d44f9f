#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
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

/// The free parts of a range of bytes, as offsets without memory. The range starts empty and grows
/// when bytes beyond its end are given back.
class FreeRanges {
 public:
  /// Takes num_bytes from the smallest free part that is large enough, the one with the lowest
  /// offset among equals, and returns their offset; nullopt if there is none.
  /// REQUIRES: num_bytes > 0.
  std::optional<int64_t> take(int64_t num_bytes);

  /// Frees [offset, offset + num_bytes) and joins it with free neighbours.
  /// REQUIRES: num_bytes > 0, and no part of it is free.
  void give_back(int64_t offset, int64_t num_bytes);

  /// Free bytes that end at `end`.
  int64_t bytes_before(int64_t end) const;

 private:
  using Parts = std::map<int64_t, int64_t>;  // offset -> bytes
  void add(int64_t offset, int64_t num_bytes);
  void remove(Parts::iterator part);

  Parts parts_;
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (bytes, offset) of the same parts
};

}  // namespace crossdock
