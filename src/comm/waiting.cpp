#include "comm/waiting.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/check.hpp"
#include "core/process.hpp"

namespace crossdock::comm {
namespace {

constexpr double kMaxSeconds = 1e9;  // over 30 years, far from overflow of the clock

std::chrono::nanoseconds seconds_from_environment(const char* variable, double otherwise) {
  double seconds = otherwise;
  const std::string text = environment_variable(variable);
  if (!text.empty()) {
    const char* end = text.data() + text.size();
    const auto [stop, failure] = std::from_chars(text.data(), end, seconds);
    const bool is_number = failure == std::errc{} && stop == end && std::isfinite(seconds);
    CROSSDOCK_CHECK(is_number && seconds > 0, variable,
                    " must be a positive number of seconds such as 600 or 2.5, got '", text, "'");
  }
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, kMaxSeconds) * 1e9));
}

}  // namespace

std::chrono::nanoseconds default_arrival_deadline() {
  return seconds_from_environment("CROSSDOCK_ARRIVAL_DEADLINE", 600);
}

std::chrono::nanoseconds default_progress_deadline() {
  return seconds_from_environment("CROSSDOCK_PROGRESS_DEADLINE", 30);
}

Clock::time_point deadline_after(Clock::time_point start, std::chrono::nanoseconds duration) {
  const auto longest = std::chrono::seconds(static_cast<int64_t>(kMaxSeconds));
  return start + std::min<std::chrono::nanoseconds>(duration, longest);
}

std::string to_seconds_text(std::chrono::nanoseconds duration) {
  return concat(std::round(std::chrono::duration<double>(duration).count() * 1000) / 1000, " s");
}

}  // namespace crossdock::comm
