#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace crossdock::cli {

/// A horizontal bar that fills `part`, in [0, 1], of `width` characters: of blocks, to an eighth of
/// a character, or of ASCII characters.
std::string bar(double part, int width, bool has_blocks = true);

/// One character per value, whose height shows the value relative to the largest; zero is a blank,
/// and without blocks a digit from 1 to 8 stands for the height. `per_line` characters in a line;
/// lines after the first are indented.
std::string columns(std::span<const int64_t> values, int per_line, int indent,
                    bool has_blocks = true);

}  // namespace crossdock::cli
