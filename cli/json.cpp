#include "cli/json.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

void append_number(double number, std::string& text) {
  if (!std::isfinite(number)) {
    text += std::isnan(number) ? "\"NaN\"" : number > 0 ? "\"Infinity\"" : "\"-Infinity\"";
    return;
  }
  std::array<char, 32> digits;
  text.append(digits.data(), std::to_chars(digits.begin(), digits.end(), number).ptr);
  // Readers that tell integers from other numbers would lose the sign of "-0".
  if (number == 0 && std::signbit(number)) text += ".0";
}

void append(const Json& json, int depth, int indented_depth, std::string& text) {
  if (json.is_number_float()) return append_number(json.get<double>(), text);
  if (!json.is_structured()) {
    text += json.dump(-1, ' ', false, Json::error_handler_t::replace);
    return;
  }
  const bool is_row =
      json.is_array() && std::ranges::all_of(json, [](const Json& one) { return one.is_number(); });
  const bool is_indented = depth < indented_depth && !is_row && !json.empty();
  const auto new_line = [&](int indent) {
    if (is_indented) text.append(1, '\n').append(2 * static_cast<size_t>(indent), ' ');
  };
  const char* separator = "";
  text += json.is_object() ? '{' : '[';
  for (const auto& [key, value] : json.items()) {
    text += separator;
    separator = is_indented ? "," : ", ";
    new_line(depth + 1);
    if (json.is_object()) text += Json(key).dump() + ": ";
    append(value, depth + 1, indented_depth, text);
  }
  new_line(depth);
  text += json.is_object() ? '}' : ']';
}

}  // namespace

std::string json_text(const Json& json, int indented_depth) {
  std::string text;
  append(json, 0, indented_depth, text);
  return text;
}

double read_number(const Json& json) {
  if (json == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (json == "Infinity") return std::numeric_limits<double>::infinity();
  if (json == "-Infinity") return -std::numeric_limits<double>::infinity();
  return json.get<double>();
}

std::string error_json(std::string_view message) {
  return json_text({{"error", message}}, 0);
}

void read_output(const std::string& text, const std::function<void(const Json&)>& read) {
  try {
    read(Json::parse(text));
  } catch (const std::logic_error& error) {  // a number as text
    throw Error(ErrorCode::kInternal, std::string("results of the ranks: ") + error.what());
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::kInternal, std::string("results of the ranks: ") + error.what());
  }
}

}  // namespace crossdock::cli
