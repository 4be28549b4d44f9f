#pragma once

#include <functional>
#include <string>
#include <vector>

namespace crossdock::cli {

/// A terminal after a program has run in it.
struct Screen {
  int status = -1;                 // exit status; -1 if a signal ended it
  int signal = 0;                  // the signal that ended it
  std::string bytes;               // as written
  std::vector<std::string> lines;  // as left on the screen, without colours
  bool has_wrapped = false;        // a line was longer than the terminal is wide

  std::string text() const;
};

/// Called with what the program has written; returns what is typed, or nothing.
using Typing = std::function<std::string(const std::string& bytes)>;

/// Runs a command line, as a shell reads it, with a pseudo terminal of this width as its standard
/// input, output and error. Ends it after two minutes. `typing`, if given, is called repeatedly
/// until it returns a text, which is then typed.
Screen run_in_terminal(const std::string& line, int columns, Typing typing = nullptr);

}  // namespace crossdock::cli
