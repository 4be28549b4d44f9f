#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace crossdock::comm {

/// Memory in several pieces, addressed as one array of bytes. `Byte` is std::byte or const
/// std::byte.
template <typename Byte>
class JoinedBytes {
 public:
  /// Appends a piece; an empty piece may be null.
  void add(Byte* data, int64_t num_bytes) {
    pieces_.push_back({data, static_cast<size_t>(num_bytes)});
    offsets_.push_back(offsets_.back() + num_bytes);
  }

  int64_t num_bytes() const { return offsets_.back(); }

  /// Calls use(span) for each contiguous part of the bytes [begin, end), in order. REQUIRES:
  /// 0 <= begin <= end <= num_bytes().
  template <typename Use>
  void visit(int64_t begin, int64_t end, const Use& use) const {
    const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), begin);
    for (auto i = static_cast<size_t>(after - offsets_.begin()) - 1; begin < end; ++i) {
      const int64_t stop = std::min(end, offsets_[i + 1]);
      if (stop == begin) continue;  // an empty piece
      use(pieces_[i].subspan(static_cast<size_t>(begin - offsets_[i]),
                             static_cast<size_t>(stop - begin)));
      begin = stop;
    }
  }

 private:
  std::vector<std::span<Byte>> pieces_;
  std::vector<int64_t> offsets_ = {0};  // [pieces + 1]
};

}  // namespace crossdock::comm
