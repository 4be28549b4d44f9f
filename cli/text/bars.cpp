#include "cli/text/bars.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

namespace crossdock::cli {
namespace {

constexpr std::array<std::string_view, 9> kLong = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█"};
constexpr std::array<std::string_view, 9> kHigh = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};

}  // namespace

std::string bar(double part, int width, bool has_blocks) {
  if (!has_blocks) {
    const auto count = std::clamp<long>(std::lround(part * width), 0, width);
    return std::string(static_cast<size_t>(count), '#');
  }
  const int eighths = std::clamp(static_cast<int>(std::lround(part * 8 * width)), 0, 8 * width);
  std::string text;
  for (int left = eighths; left > 0; left -= 8) {
    text += kLong[static_cast<size_t>(std::min(left, 8))];
  }
  return text;
}

std::string columns(std::span<const int64_t> values, int per_line, int indent, bool has_blocks) {
  const int64_t most = std::max<int64_t>(1, values.empty() ? 0 : *std::ranges::max_element(values));
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0 && i % static_cast<size_t>(per_line) == 0) {
      text += '\n';
      text.append(static_cast<size_t>(indent), ' ');
    }
    const int64_t eighths = (8 * values[i] + most - 1) / most;  // anything above zero is visible
    if (has_blocks) {
      text += kHigh[static_cast<size_t>(eighths)];
    } else {
      text += eighths == 0 ? ' ' : static_cast<char>('0' + eighths);
    }
  }
  return text;
}

}  // namespace crossdock::cli
