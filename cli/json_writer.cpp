#include "cli/json_writer.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

namespace crossdock::cli {

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

// Writes the separator before the next entry.
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
  // Readers that tell integers from other numbers would lose the sign of "-0".
  if (number == 0 && std::signbit(number)) text_ += ".0";
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
  using Json = nlohmann::json;
  const auto is_plain = [](char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; };
  if (std::ranges::all_of(text, is_plain)) {  // the usual case, without copies
    text_.append(1, '"').append(text).append(1, '"');
  } else {
    text_ += Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
  }
}

std::string error_json(std::string_view message) {
  JsonWriter writer(0);
  writer.begin_object();
  writer.field("error", message);
  writer.end_object();
  return writer.text();
}

}  // namespace crossdock::cli
