#include "cli/options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <limits>
#include <sstream>
#include <utility>

#include "bench/whole_number.hpp"
#include "cli/text/suggestion.hpp"

namespace crossdock::cli {
namespace {

// The number type of an option's value, and whether it is a list.
template <typename T>
struct ValueTraits {
  using Number = T;
  static constexpr bool kIsList = false;
  static std::string default_of(T value) {
    std::ostringstream text;
    text << value;
    return value == T{} ? "" : text.str();
  }
};
template <typename T>
struct ValueTraits<std::optional<T>> {
  using Number = T;
  static constexpr bool kIsList = false;
  static std::string default_of(const std::optional<T>&) { return ""; }
};
template <typename T>
struct ValueTraits<std::vector<T>> {
  using Number = T;
  static constexpr bool kIsList = true;
  static std::string default_of(const std::vector<T>&) { return ""; }
};

std::string with_default(const std::string& words, const std::string& value) {
  return value.empty() ? words : words + " (default: " + value + ")";
}

// "a, b or c"
std::string alternatives(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text.append(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ").append(names[i]);
  }
  return text;
}

// A decimal number in the range. For transform(), not check(): it removes leading zeros, which
// CLI11 would take for an octal number. `limit`: the largest value of the type.
CLI::Validator in_range(const Range& range, int64_t limit) {
  const auto complaint = [least = range.least, largest = range.largest.value_or(limit),
                          has_largest = range.largest.has_value()](std::string& text) {
    const std::optional<bench::WholeNumber> number = bench::parse_whole_number(text);
    if (!number) return "must be a whole number, got \"" + text + "\"";
    const int64_t value = number->value;
    if (number->fits && value >= least && value <= largest) {
      text = std::to_string(value);
      return std::string();
    }
    if (value < least && !has_largest) {
      return "must be at least " + std::to_string(least) + ", got " + text;
    }
    return "must be from " + std::to_string(least) + " to " + std::to_string(largest) + ", got " +
           text;
  };
  return {complaint, "", ""};
}

CLI::Validator is_number() {
  const auto complaint = [](const std::string& text) -> std::string {
    double value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, failure] = std::from_chars(text.data(), end, value);
    if (stop == end && failure == std::errc{}) return "";
    return "must be a number, got \"" + text + "\"";
  };
  return {complaint, "", ""};
}

CLI::Validator is_one_of(const std::vector<std::string>& names) {
  const auto complaint = [=](const std::string& text) -> std::string {
    if (std::find(names.begin(), names.end(), text) != names.end()) return "";
    return "must be one of " + CLI::detail::join(names, ", ") + "; got \"" + text + "\"" +
           suggestion(text, names);
  };
  return {complaint, "", ""};
}

}  // namespace

void Options::describe(const char* name, const char* placeholder, const std::string& words,
                       const std::vector<std::string>& choices) {
  text_.options.push_back({CLI::detail::split(name, ','), placeholder, words, choices});
}

template <typename Number>
void Options::whole_number(const char* name, Number& value, const Range& range,
                           const std::string& words) {
  using Traits = ValueTraits<Number>;
  constexpr auto kTypeLimit = std::numeric_limits<typename Traits::Number>::max();
  constexpr auto kLimit = std::cmp_less(kTypeLimit, std::numeric_limits<int64_t>::max())
                              ? static_cast<int64_t>(kTypeLimit)
                              : std::numeric_limits<int64_t>::max();
  const std::string shown = with_default(words, Traits::default_of(value));
  const char* const placeholder = Traits::kIsList ? "LIST" : "N";
  CLI::Option* option = command_.add_option(name, value, shown);
  option->transform(in_range(range, kLimit))->option_text(placeholder);
  describe(name, placeholder, shown);
  if (Traits::kIsList) option->delimiter(',');
}

template void Options::whole_number(const char*, int&, const Range&, const std::string&);
template void Options::whole_number(const char*, int64_t&, const Range&, const std::string&);
template void Options::whole_number(const char*, uint64_t&, const Range&, const std::string&);
template void Options::whole_number(const char*, std::optional<int>&, const Range&,
                                    const std::string&);
template void Options::whole_number(const char*, std::optional<int64_t>&, const Range&,
                                    const std::string&);
template void Options::whole_number(const char*, std::optional<uint64_t>&, const Range&,
                                    const std::string&);
template void Options::whole_number(const char*, std::vector<int>&, const Range&,
                                    const std::string&);

template <typename Number>
void Options::number(const char* name, Number& value, std::string words) {
  words = with_default(words, ValueTraits<Number>::default_of(value));
  command_.add_option(name, value, words)->check(is_number())->option_text("X");
  describe(name, "X", words);
}

template void Options::number(const char*, double&, std::string);
template void Options::number(const char*, std::optional<double>&, std::string);

void Options::text(const char* name, const char* placeholder, std::string& value,
                   const std::string& words) {
  const auto complaint = [](const std::string& given) -> std::string {
    return given.empty() ? "must not be empty; leave the option out instead" : "";
  };
  const std::string shown = with_default(words, value);
  command_.add_option(name, value, shown)
      ->check(CLI::Validator(complaint, "", ""))
      ->option_text(placeholder);
  describe(name, placeholder, shown);
}

void Options::choice(const char* name, std::string& value, const std::vector<std::string>& names,
                     const std::string& words, const std::string& fallback) {
  const std::string shown =
      with_default(words + ": " + alternatives(names), value.empty() ? fallback : value);
  command_.add_option(name, value, shown)->check(is_one_of(names))->option_text("NAME");
  describe(name, "NAME", shown, names);
}

void Options::optional_choice(const char* name, std::string& value,
                              const std::vector<std::string>& names, const std::string& words) {
  const std::string shown = words + ": " + alternatives(names) + " (alone: " + names.front() + ")";
  command_.add_option(name, value, shown)
      ->expected(0, 1)
      ->option_text("[NAME]")
      ->default_str(names.front())  // if the option is given without a value
      ->check(is_one_of(names));
  describe(name, "[NAME]", shown, names);
}

void Options::list(const char* name, std::vector<std::string>& values, const std::string& words) {
  command_.add_option(name, values, words)->delimiter(',')->option_text("LIST");
  describe(name, "LIST", words);
}

void Options::choices(const char* name, std::vector<std::string>& values,
                      const std::vector<std::string>& names, const std::string& words,
                      const std::string& fallback) {
  const std::string shown = with_default(words + ": " + CLI::detail::join(names, ", "), fallback);
  command_.add_option(name, values, shown)
      ->delimiter(',')
      ->check(is_one_of(names))
      ->option_text("LIST");
  describe(name, "LIST", shown, names);
}

void Options::flag(const char* name, bool& value, const std::string& words) {
  command_.add_flag(name, value, words);
  describe(name, "", words);
}

void Options::flag_off(const char* name, bool& value, const std::string& words) {
  command_.add_flag_callback(
      name, [&value] { value = false; }, words);
  describe(name, "", words);
}

void Options::hidden_flag(const char* name, bool& value) {
  command_.add_flag(name, value)->group("");
}

void Options::hidden_text(const char* name, std::string& value) {
  command_.add_option(name, value)->group("");
}

void Options::argument(const char* name, std::string& value, const std::string& words) {
  command_.add_option(name, value, words)->required();
  text_.options.push_back({{}, name, words});
}

void Options::argument(const char* name, std::string& value, const std::vector<std::string>& names,
                       const std::string& words) {
  const std::string shown = words + ": " + alternatives(names);
  command_.add_option(name, value, shown)->check(is_one_of(names))->required(value.empty());
  text_.options.push_back({{}, name, shown, names});
}

void Options::notes(const char* text) {
  command_.footer(text);
  text_.notes = text;
}

}  // namespace crossdock::cli
