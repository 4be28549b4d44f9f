#pragma once

#include <string>
#include <string_view>

/// Text in columns of a terminal. UTF-8 characters count as one column each, colour codes as none.
namespace crossdock::cli {

/// Columns that the text takes, which must be one line.
int display_width(std::string_view text);

/// The text, shortened to `width` columns with "..." at its end if it is longer. Must not contain
/// colour codes.
std::string cut(std::string_view text, int width);

/// Breaks lines at spaces so that none is wider than `width`, unless a single word is. Lines that
/// this adds start with `indent` spaces.
std::string wrap(std::string_view text, int width, int indent = 0);

}  // namespace crossdock::cli
