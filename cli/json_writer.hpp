#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace crossdock::cli {

/// Writes JSON text sequentially. Numbers have the fewest digits that identify the double; values
/// that JSON cannot represent become "NaN", "Infinity" or "-Infinity". Bytes that are not UTF-8
/// become U+FFFD. In the outermost `indented_depth` levels, every entry is on its own line.
class JsonWriter {
 public:
  explicit JsonWriter(int indented_depth = 2) : indented_depth_(indented_depth) {}

  void begin_object() { begin('{'); }
  void end_object() { end('}'); }
  void begin_array() { begin('['); }
  void end_array() { end(']'); }
  /// An array on a single line, at any depth.
  void list(const auto& values) {
    const int kept = indented_depth_;
    indented_depth_ = std::min(indented_depth_, depth_);
    begin_array();
    for (const auto& entry : values) value(entry);
    end_array();
    indented_depth_ = kept;
  }
  void key(std::string_view name);

  void value(double number);
  void value(std::signed_integral auto number) { integer(static_cast<int64_t>(number)); }
  void value(bool truth);
  void value(std::string_view text);
  void value(const char* text) { value(std::string_view(text)); }
  void value(const std::string& text) { value(std::string_view(text)); }
  void null();

  void field(std::string_view name, const auto& content) {
    key(name);
    value(content);
  }

  /// The text so far.
  const std::string& text() const { return text_; }

 private:
  void begin(char bracket);
  void end(char bracket);
  void integer(int64_t number);
  void separate();
  void new_line();
  void quote(std::string_view text);

  int indented_depth_;
  int depth_ = 0;
  bool is_first_ = true;  // entry of its object or array
  bool after_key_ = false;
  std::string text_;
};

/// {"error": message}, which a command prints instead of its results if it fails.
std::string error_json(std::string_view message);

}  // namespace crossdock::cli
