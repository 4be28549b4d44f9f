#pragma once

#include <cstddef>
#include <string_view>

namespace crossdock {

/// Bytes of the UTF-8 character that `text` begins with; 0 if it begins with none.
/// REQUIRES: text is not empty.
size_t utf8_length(std::string_view text);

}  // namespace crossdock
