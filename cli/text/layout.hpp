#pragma once

#include <string>
#include <string_view>

/// Text in columns of a terminal. UTF-8 characters count as one column each, colour codes as none.
namespace crossdock::cli {

/// Columns that the text takes. It must be one line.
int display_width(std::string_view text);

/// The text, cut to `width` columns with "..." at the end if it is longer. Must not contain colour
/// codes.
std::string cut(std::string_view text, int width);

/// Breaks lines at spaces so that none is wider than `width`, unless a single word is. Continuation
/// lines start with `indent` spaces.
std::string wrap(std::string_view text, int width, int indent = 0);

}  // namespace crossdock::cli
