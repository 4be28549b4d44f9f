#include "cli/text/terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <limits>

#include "crossdock/mpi.hpp"

namespace crossdock::cli {
namespace {

constexpr int kDefaultWidth = 80;
constexpr int kLeastWidth = 40;  // below this, the terminal wraps lines

// Empty if it is not set.
std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int width_of(int descriptor, int fallback) {
  const std::string_view columns = variable("COLUMNS");
  int width = 0;
  std::from_chars(columns.data(), columns.data() + columns.size(), width);
  winsize window{};
  if (width <= 0 && ioctl(descriptor, TIOCGWINSZ, &window) == 0) width = window.ws_col;
  return width <= 0 ? fallback : std::max(width, kLeastWidth);
}

bool is_plain_terminal() {
  return !variable("NO_COLOR").empty() || variable("TERM").empty() || variable("TERM") == "dumb";
}

bool has_colour() {
  if (!variable("NO_COLOR").empty()) return false;
  const std::string_view force = variable("CLICOLOR_FORCE");
  if (!force.empty() && force != "0") return true;
  // mpirun may give its processes a terminal of its own, wherever their output goes.
  return !is_plain_terminal() && !mpi_is_launched() && isatty(STDOUT_FILENO) != 0;
}

// As the C library chooses the locale, which need not be installed.
bool has_utf8_locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    std::string locale(variable(name));
    if (locale.empty()) continue;
    std::ranges::transform(locale, locale.begin(),
                           [](unsigned char letter) { return std::tolower(letter); });
    return locale.find("utf-8") != std::string::npos || locale.find("utf8") != std::string::npos;
  }
  return false;
}

constexpr const char* code_of(Colour colour) {
  switch (colour) {
    case Colour::kBold:
      return "1";
    case Colour::kRed:
      return "31";
    case Colour::kGreen:
      return "32";
    case Colour::kCyan:
      return "36";
    case Colour::kNone:
      break;
  }
  return "0";
}

}  // namespace

TextStyle output_style() {
  return {.width = width_of(STDOUT_FILENO, kDefaultWidth),
          .colour = has_colour(),
          .has_blocks = has_utf8_locale()};
}

int message_width() {
  return width_of(STDERR_FILENO, std::numeric_limits<int>::max());
}

bool can_show_progress() {
  return !is_plain_terminal() && isatty(STDERR_FILENO) != 0;
}

std::string paint(std::string_view words, Colour colour, const TextStyle& style) {
  if (!style.colour || colour == Colour::kNone || words.empty()) return std::string(words);
  return std::string("\x1b[") + code_of(colour) + "m" + std::string(words) + "\x1b[0m";
}

}  // namespace crossdock::cli
