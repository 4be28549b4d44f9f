#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace crossdock::cli {

/// A horizontal bar of blocks, `part` of `width` characters long, in eighths of a character. part
/// in [0, 1].
std::string bar(double part, int width);

/// One character per value, as high as its part of the largest; `per_line` in a line, lines after
/// the first indented. Zero is a blank.
std::string columns(std::span<const int64_t> values, int per_line, int indent);

}  // namespace crossdock::cli
