#include "cli/text/numbers.hpp"

#include <array>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <sstream>

namespace crossdock::cli {

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string with_unit(double value, const char* unit) {
  constexpr std::array<const char*, 7> kPrefixes = {"", "k", "M", "G", "T", "P", "E"};
  size_t prefix = 0;
  for (; value >= 999.5 && prefix + 1 < kPrefixes.size(); ++prefix) value /= 1000.0;
  const bool is_whole = value == 0 || (prefix == 0 && value == std::floor(value));
  const int digits = is_whole ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  const std::string suffix = std::string(kPrefixes[prefix]) + unit;
  return fixed(value, digits) + (suffix.empty() ? "" : " " + suffix);
}

std::string bytes_text(double bytes) {
  return with_unit(bytes, "B");
}

std::string time_text(double seconds) {
  const bool is_long = seconds >= 0.9995;
  const double value = is_long ? seconds : seconds * 1e3;
  const int digits = value < 9.9995 ? 3 : value < 99.995 ? 2 : 1;
  return fixed(value, digits) + (is_long ? " s" : " ms");
}

std::string hex(uint64_t bits) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(bits));
  return digits.data();
}

std::string counted(long long count, const std::string& singular) {
  return std::to_string(count) + " " + singular + (count == 1 ? "" : "s");
}

}  // namespace crossdock::cli
