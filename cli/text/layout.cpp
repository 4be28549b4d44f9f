#include "cli/text/layout.hpp"

#include <algorithm>

namespace crossdock::cli {
namespace {

bool continues_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) == 0x80;
}

// Appends one line to `result`, broken where needed.
void wrap_line(std::string_view line, int width, int indent, std::string& result) {
  int column = 0;
  for (bool is_first = true; !line.empty(); is_first = false) {
    const size_t word_begin = std::min(line.find_first_not_of(' '), line.size());
    const size_t word_end = std::min(line.find(' ', word_begin), line.size());
    const std::string_view word = line.substr(word_begin, word_end - word_begin);
    if (word.empty()) return;
    const auto gap = static_cast<int>(word_begin);
    if (!is_first && column + gap + display_width(word) > width) {
      result.append("\n").append(static_cast<size_t>(indent), ' ');
      column = indent;
    } else {
      result.append(word_begin, ' ');
      column += gap;
    }
    result += word;
    column += display_width(word);
    line.remove_prefix(word_end);
  }
}

}  // namespace

int display_width(std::string_view text) {
  int width = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      i = std::min(text.find('m', i), text.size());
    } else if (!continues_character(text[i])) {
      ++width;
    }
  }
  return width;
}

std::string cut(std::string_view text, int width) {
  if (display_width(text) <= width) return std::string(text);
  constexpr std::string_view kMore = "...";
  const int room = std::max(0, width - static_cast<int>(kMore.size()));
  size_t end = 0;
  for (int column = 0; end < text.size(); ++end) {
    if (!continues_character(text[end]) && column++ == room) break;
  }
  return std::string(text.substr(0, end)) +
         std::string(kMore.substr(0, static_cast<size_t>(std::clamp(width, 0, 3))));
}

std::string wrap(std::string_view text, int width, int indent) {
  std::string result;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    wrap_line(text.substr(begin, end - begin), width, indent, result);
    if (end < text.size()) result += '\n';
    begin = end + 1;
  }
  return result;
}

}  // namespace crossdock::cli
