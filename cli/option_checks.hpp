#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

/// What an option takes. Complaints say what it must be and what came; the name of the option goes
/// before them.
namespace crossdock::cli {

/// Numbers that fit into an int or an int64_t; such a limit is not worth words.
constexpr int64_t kInt = std::numeric_limits<int>::max();
constexpr int64_t kLong = std::numeric_limits<int64_t>::max();

/// A decimal number in [least, largest]. Pass it to transform(), not check(): it removes leading
/// zeros, as CLI11 would read an octal number.
inline CLI::Validator whole_number(int64_t least, int64_t largest) {
  const auto complaint = [=](std::string& text) -> std::string {
    int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, failure] = std::from_chars(text.data(), end, value);
    if (stop != end || failure == std::errc::invalid_argument) {
      return "must be a whole number, got \"" + text + "\"";
    }
    const bool fits = failure == std::errc{} && value >= least && value <= largest;
    if (fits) {
      text = std::to_string(value);
      return "";
    }
    const bool is_small = failure == std::errc{} ? value < least : text.front() == '-';
    if (is_small && (largest == kInt || largest == kLong)) {
      return "must be at least " + std::to_string(least) + ", got " + text;
    }
    return "must be from " + std::to_string(least) + " to " + std::to_string(largest) + ", got " +
           text;
  };
  return {complaint, "", ""};
}

inline CLI::Validator number() {
  const auto complaint = [](const std::string& text) -> std::string {
    double value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, failure] = std::from_chars(text.data(), end, value);
    if (stop == end && failure == std::errc{}) return "";
    return "must be a number, got \"" + text + "\"";
  };
  return {complaint, "", ""};
}

/// The help shows the names.
inline CLI::Validator one_of(const std::vector<std::string>& names) {
  const auto complaint = [=](const std::string& text) -> std::string {
    if (std::find(names.begin(), names.end(), text) != names.end()) return "";
    return "must be one of " + CLI::detail::join(names, ", ") + "; got \"" + text + "\"";
  };
  return {complaint, "{" + CLI::detail::join(names, ",") + "}", ""};
}

}  // namespace crossdock::cli
