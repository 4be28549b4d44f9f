#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace crossdock::bench {

struct WholeNumber {
  int64_t value = 0;
  bool fits = true;  // in an int64_t; if not, value is the limit that it exceeds
};

/// A number as people type it: decimal digits, also with k, M or G for powers of 1024 ("8k" is
/// 8192) or a power of ten ("1e6"). Nothing if the text is not one.
std::optional<WholeNumber> parse_whole_number(std::string_view text);

}  // namespace crossdock::bench
