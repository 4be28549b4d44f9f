#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}  // namespace CLI

namespace crossdock::cli {

/// What help, man pages and completions say of an option.
struct OptionText {
  std::vector<std::string> names;      // "--preset", "--model"; empty: a positional argument
  std::string placeholder;             // of its value: "N"; empty: it has none
  std::string words;                   // what it is for
  std::vector<std::string> choices{};  // the values that it takes; empty: any
};

/// The same of a command.
struct CommandText {
  std::string name;
  std::string words;
  std::string notes{};
  std::vector<OptionText> options{};
};

/// The whole numbers that an option takes.
struct Range {
  int64_t least = 0;
  std::optional<int64_t> largest{};  // not given: the largest value of the type
};

/// The options of one command. The commands add theirs through this class, so that only its own
/// source includes CLI11, which is slow to compile. Help shows an initial value that is neither
/// zero nor empty as the default.
class Options {
 public:
  Options(CLI::App& command, CommandText& text) : command_(command), text_(text) {}

  /// int, int64_t or uint64_t; optional; or a vector, which takes a comma-separated list. Values
  /// may end with k, M or G (powers of 1024) or a power of ten ("1e6").
  template <typename Number>
  void whole_number(const char* name, Number& value, const Range& range, const std::string& words);
  /// double, or optional.
  template <typename Number>
  void number(const char* name, Number& value, std::string words);
  /// Any text that is not empty; help calls it `placeholder`.
  void text(const char* name, const char* placeholder, std::string& value,
            const std::string& words);
  /// One of `names`. `fallback` describes the default if the value is empty.
  void choice(const char* name, std::string& value, const std::vector<std::string>& names,
              const std::string& words, const std::string& fallback = "");
  /// An option whose value may be omitted; it then means the first of `names`.
  void optional_choice(const char* name, std::string& value, const std::vector<std::string>& names,
                       const std::string& words);
  /// Any texts, separated by commas.
  void list(const char* name, std::vector<std::string>& values, const std::string& words);
  /// Some of `names`, separated by commas; `fallback` describes the default.
  void choices(const char* name, std::vector<std::string>& values,
               const std::vector<std::string>& names, const std::string& words,
               const std::string& fallback);
  void flag(const char* name, bool& value, const std::string& words);
  /// Sets the value to false.
  void flag_off(const char* name, bool& value, const std::string& words);
  /// A flag that help does not show.
  void hidden_flag(const char* name, bool& value);
  void hidden_text(const char* name, std::string& value);
  /// A required positional argument.
  void argument(const char* name, std::string& value, const std::string& words);
  /// A positional argument that is one of `names`; required if the value is empty.
  void argument(const char* name, std::string& value, const std::vector<std::string>& names,
                const std::string& words);

  /// The end of the help text, in lines of at most 80 columns.
  void notes(const char* text);

 private:
  void describe(const char* name, const char* placeholder, const std::string& words,
                const std::vector<std::string>& choices = {});

  CLI::App& command_;
  CommandText& text_;
};

}  // namespace crossdock::cli
