#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace crossdock::fuzz {

/// Takes values from the bytes that libFuzzer chose; zeros after their end.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(data, size) {}

  bool is_empty() const { return rest_.empty(); }

  template <typename Value>
  Value take() {
    Value value{};
    const size_t count = std::min(sizeof value, rest_.size());
    if (count > 0) std::memcpy(&value, rest_.data(), count);
    rest_ = rest_.subspan(count);
    return value;
  }

  /// Within [least, most].
  int64_t integer(int64_t least, int64_t most) {
    const auto width = static_cast<uint64_t>(most - least) + 1;
    return least +
           static_cast<int64_t>((width <= 256 ? take<uint8_t>() : take<uint32_t>()) % width);
  }

  /// Not after the end: an input that is too short has nothing unusual there.
  bool one_in(int count) { return take<uint8_t>() % count == count - 1; }

  template <typename Entry, size_t kSize>
  Entry one_of(const Entry (&entries)[kSize]) {
    return entries[take<uint8_t>() % kSize];
  }

  std::vector<std::byte> bytes(size_t most) {
    const size_t count = std::min(most, rest_.size());
    const auto taken = std::as_bytes(rest_.first(count));
    rest_ = rest_.subspan(count);
    return {taken.begin(), taken.end()};
  }

 private:
  std::span<const uint8_t> rest_;
};

}  // namespace crossdock::fuzz
