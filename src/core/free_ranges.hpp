#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace crossdock {

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
