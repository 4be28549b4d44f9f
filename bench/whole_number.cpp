#include "bench/whole_number.hpp"

#include <charconv>
#include <limits>
#include <system_error>

namespace crossdock::bench {

std::optional<WholeNumber> parse_whole_number(std::string_view text) {
  using Limits = std::numeric_limits<int64_t>;
  const char* const end = text.data() + text.size();
  WholeNumber number;
  const auto limit = [&] {
    return WholeNumber{text.front() == '-' ? Limits::min() : Limits::max(), false};
  };
  const auto [stop, failure] = std::from_chars(text.data(), end, number.value);
  if (failure == std::errc::invalid_argument) return std::nullopt;
  int64_t base = 1024;
  int power = 0;
  if (stop + 1 == end) {
    constexpr std::string_view kLetters = "kMG";
    const size_t letter = kLetters.find(*stop == 'K' ? 'k' : *stop);
    if (letter == std::string_view::npos) return std::nullopt;
    power = static_cast<int>(letter) + 1;
  } else if (stop != end) {
    base = 10;
    if (*stop != 'e' && *stop != 'E') return std::nullopt;
    const auto [last, no_power] = std::from_chars(stop + 1, end, power);
    if (last != end || no_power != std::errc{} || stop[1] == '-') return std::nullopt;
  }
  if (failure != std::errc{}) return limit();
  for (; power > 0 && number.value != 0; --power) {
    if (__builtin_mul_overflow(number.value, base, &number.value)) return limit();
  }
  return number;
}

}  // namespace crossdock::bench
