#pragma once

#include <string>
#include <string_view>

namespace crossdock::cli {

/// Width and colour of printed text.
struct TextStyle {
  int width = 80;  // columns
  bool colour = false;
};

/// The style for standard output. Width: COLUMNS, else that of the terminal, else 80. Colour: where
/// a terminal shows the output, unless NO_COLOR is set or TERM is "dumb"; CLICOLOR_FORCE turns it
/// on without a terminal. Processes that mpirun started cannot see the terminal; those this program
/// starts inherit its style through COLUMNS and CLICOLOR_FORCE.
TextStyle output_style();

/// Width for messages on standard error: COLUMNS, else that of the terminal, else unlimited.
int message_width();

/// Whether a line on standard error can be written over: a terminal, NO_COLOR not set, TERM not
/// "dumb".
bool can_show_progress();

enum class Colour { kNone, kBold, kRed, kGreen, kCyan };

/// The words in this colour, if the style has colour.
std::string paint(std::string_view words, Colour colour, const TextStyle& style);

}  // namespace crossdock::cli
