#include "cli/json_writer.hpp"

#include <array>
#include <charconv>
#include <cmath>

namespace crossdock::cli {
namespace {

// Bytes of the UTF-8 sequence at the start of `text`, 0 if there is none.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const size_t length = lead < 0x80   ? 1
                        : lead < 0xc2 ? 0
                        : lead < 0xe0 ? 2
                        : lead < 0xf0 ? 3
                        : lead < 0xf5 ? 4
                                      : 0;
  if (length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, beyond the last code point.
  if (lead == 0xe0 && byte(1) < 0xa0) return 0;
  if (lead == 0xed && byte(1) >= 0xa0) return 0;
  if (lead == 0xf0 && byte(1) < 0x90) return 0;
  if (lead == 0xf4 && byte(1) >= 0x90) return 0;
  return length;
}

}  // namespace

void JsonWriter::begin(char bracket) {
  separate();
  text_ += bracket;
  ++depth_;
  is_first_ = true;
}

void JsonWriter::end(char bracket) {
  --depth_;
  if (!is_first_ && depth_ < indented_depth_) new_line();
  text_ += bracket;
  is_first_ = false;
}

void JsonWriter::new_line() {
  text_ += '\n';
  text_.append(2 * static_cast<size_t>(depth_), ' ');
}

// What stands between the text so far and the next entry.
void JsonWriter::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (depth_ == 0) return;
  if (!is_first_) text_ += depth_ <= indented_depth_ ? "," : ", ";
  if (depth_ <= indented_depth_) new_line();
  is_first_ = false;
}

void JsonWriter::key(std::string_view name) {
  separate();
  quote(name);
  text_ += ": ";
  after_key_ = true;
}

void JsonWriter::value(double number) {
  if (!std::isfinite(number)) {
    value(std::isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity");
    return;
  }
  separate();
  std::array<char, 32> digits;
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  text_.append(digits.data(), result.ptr);
}

void JsonWriter::integer(int64_t number) {
  separate();
  text_ += std::to_string(number);
}

void JsonWriter::value(bool truth) {
  separate();
  text_ += truth ? "true" : "false";
}

void JsonWriter::value(std::string_view text) {
  separate();
  quote(text);
}

void JsonWriter::null() {
  separate();
  text_ += "null";
}

void JsonWriter::quote(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  text_ += '"';
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const auto c = static_cast<unsigned char>(text[0]);
    if (length == 0) {
      text_ += "\xef\xbf\xbd";
    } else if (c == '"' || c == '\\') {
      text_ += {'\\', text[0]};
    } else if (c < 0x20) {
      text_ += {'\\', 'u', '0', '0', kHex[c >> 4], kHex[c & 15]};
    } else {
      text_.append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  text_ += '"';
}

std::string error_json(std::string_view message) {
  JsonWriter writer(0);
  writer.begin_object();
  writer.field("error", message);
  writer.end_object();
  return writer.text();
}

}  // namespace crossdock::cli
