#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace crossdock::cli {

/// A horizontal bar of blocks that fills `part`, in [0, 1], of `width` characters, to an eighth of
/// a character.
std::string bar(double part, int width);

/// One character per value, whose height shows the value relative to the largest; zero is a blank.
/// `per_line` characters in a line; lines after the first are indented.
std::string columns(std::span<const int64_t> values, int per_line, int indent);

}  // namespace crossdock::cli
