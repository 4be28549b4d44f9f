#pragma once

#include <string>
#include <string_view>

namespace crossdock::cli {

/// Width and colour of printed text.
struct TextStyle {
  int width = 80;  // columns
  bool colour = false;
  bool has_blocks = true;  // bars of Unicode blocks; else of ASCII characters
};

/// The style for standard output. Width: COLUMNS, else the terminal's, else 80. Colour: if the
/// output is a terminal, unless NO_COLOR is set or TERM is "dumb"; CLICOLOR_FORCE turns it on
/// without a terminal. Blocks: if the locale (LC_ALL, else LC_CTYPE, else LANG) is UTF-8. Processes
/// started by mpirun cannot see the terminal; those started by this program inherit its style
/// through COLUMNS and CLICOLOR_FORCE.
TextStyle output_style();

/// Width for messages on standard error: COLUMNS, else the terminal's, else unlimited.
int message_width();

/// Whether a line on standard error can be overwritten: a terminal, NO_COLOR not set, TERM not
/// "dumb".
bool can_show_progress();

enum class Colour { kNone, kBold, kRed, kGreen, kCyan };

/// The words in this colour, if the style has colour.
std::string paint(std::string_view words, Colour colour, const TextStyle& style);

}  // namespace crossdock::cli
