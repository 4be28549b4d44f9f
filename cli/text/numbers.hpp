#pragma once

#include <cstdint>
#include <string>

/// Numbers as reports show them.
namespace crossdock::cli {

/// With this many digits after the point.
std::string fixed(double value, int digits);

/// Three digits with a decimal prefix and the unit: "1.54 GB". `unit` may be empty.
std::string with_unit(double value, const char* unit);

std::string bytes_text(double bytes);

/// Four digits, in seconds or milliseconds: "12.34 ms".
std::string time_text(double seconds);

/// 16 hexadecimal digits.
std::string hex(uint64_t bits);

/// "1 rank", "2 ranks".
std::string counted(long long count, const std::string& singular);

}  // namespace crossdock::cli
