#pragma once

#include <cstddef>
#include <string_view>

namespace crossdock {

/// Length in bytes of the UTF-8 character at the start of `text`; 0 if it is not valid UTF-8.
/// REQUIRES: text is not empty.
size_t utf8_length(std::string_view text);

}  // namespace crossdock
