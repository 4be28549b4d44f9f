#include "cli/command_line.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <deque>
#include <memory>
#include <sstream>

#include "cli/manual.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/suggestion.hpp"
#include "cli/text/terminal.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {
namespace {

constexpr const char* kNotes = R"(Examples:
  crossdock run --preset qwen3-30b-a3b     a whole layer on 4 ranks, checked
  crossdock verify --quick                 every strategy and communicator
  crossdock info                           what is built and what works here
  crossdock eval examples/cases/demo.json  run a case, print all results
  crossdock eval --check - < case.json     a case from standard input, checked
  crossdock bench --scenario cpu-large     compare strategies with a copy
  crossdock plan --model deepseek-v3 --seq 4096 --nodes 4
  crossdock mesh --world 16 --tp 2 --ep 8  groups and coordinates of all ranks

Sizes take k, M and G (powers of 1024) and powers of ten: 8k, 1M, 1e6.

Exit status: 0, 1 if a command failed, 2 for bad command-line arguments.

Environment: COLUMNS sets the width of the text, NO_COLOR turns colour off,
CLICOLOR_FORCE=1 turns it on without a terminal; CROSSDOCK_LOG=info or debug
shows what the ranks choose, and why.)";

// Help in two columns that fit the width of the output.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string name = option->get_name(is_positional, !is_positional);
    for (size_t i = 0; (i = name.find(",-", i)) != std::string::npos;) name.insert(i + 1, " ");
    if (!is_positional && option->get_type_size() != 0) name += " " + option->get_option_text();
    return entry(name, option->get_description());
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return entry(command->get_name(), command->get_description());
  }

 private:
  static std::string entry(const std::string& name, const std::string& words) {
    constexpr size_t kNameWidth = 26;
    std::string text = "  " + name;
    if (text.size() > kNameWidth - 2) {
      text.append("\n").append(kNameWidth, ' ');
    } else {
      text.resize(kNameWidth, ' ');
    }
    return wrap(text + words, output_style().width, static_cast<int>(kNameWidth)) + "\n";
  }
};

std::string version_text() {
  return "crossdock " + std::string(describe_build().version);
}

// CLI11's parser, with all commands and their texts.
class Parser {
 public:
  explicit Parser(CommandLine& line) : app_(program_.words, program_.name) {
    const auto formatter = std::make_shared<HelpFormatter>();
    formatter->label("SUBCOMMAND", "COMMAND");
    app_.formatter(formatter);
    app_.set_version_flag("-V,--version", version_text());
    app_.require_subcommand(1);
    app_.footer(kNotes);
    program_.notes = kNotes;
    program_.options = {{{"-h", "--help"}, "", "Print this help message and exit"},
                        {{"-V", "--version"}, "", "Show the version"}};
    add("run", "Run an MoE layer, timed and checked", line.run);
    add("verify", "Check strategies and communicators against the reference", line.verify);
    add("eval", "Run a small explicit case and print all results", line.eval);
    add("plan", "Show what a job needs, before it starts", line.plan);
    add("mesh", "Show the groups of a mesh and every rank's coordinates", line.mesh);
    add("bench", "Measure steps and compare them with a memory copy", line.bench);
    add("info", "Show what is built and what works on this machine", line.info);
    std::vector<std::string> topics = {program_.name};
    for (const CommandText& command : commands_) topics.push_back(command.name);
    begin("help", "Show help for a command").argument("COMMAND", topic_, topics, "The command");
    begin("version", "Show the version");
    begin("completion", "Print completions for a shell")
        .argument("SHELL", shell_, {"bash", "zsh", "fish"}, "The shell");
    begin("man", "Print a man page").argument("PAGE", topic_, topics, "The page");
  }
  Parser(const Parser&) = delete;
  Parser& operator=(const Parser&) = delete;

  CLI::App& app() { return app_; }

  // What the command prints, if it is about other commands.
  std::string text_of(const std::string& command) const {
    if (command == "version") return version_text() + "\n";
    if (command == "completion")
      return completion_text(shell_, {commands_.begin(), commands_.end()});
    if (command == "man") {
      return man_page(topic_, program_, {commands_.begin(), commands_.end()}, version_text());
    }
    if (command != "help") return "";
    CommandLine unused;
    Parser other(unused);  // the help of this one would be that of `help`
    return topic_ == program_.name ? other.app_.help()
                                   : other.app_.get_subcommand(topic_)->help(program_.name);
  }

 private:
  Options begin(const char* name, const char* words) {
    commands_.push_back({.name = name, .words = words});
    CLI::App& command = *app_.add_subcommand(name, words)->group("Commands");
    commands_.back().options.push_back({{"-h", "--help"}, "", "Print this help message and exit"});
    return Options(command, commands_.back());
  }
  template <typename Args>
  void add(const char* name, const char* words, Args& args) {
    Options options = begin(name, words);
    add_options(options, args);
  }

  CommandText program_{.name = "crossdock",
                       .words = "Expert parallelism for Mixture-of-Experts models."};
  std::deque<CommandText> commands_;
  std::string topic_ = program_.name;
  std::string shell_;
  CLI::App app_;
};

// The names that the word may stand for.
std::vector<std::string> names_like(const std::string& word, const CLI::App& app) {
  std::vector<std::string> names;
  if (word.starts_with("-")) {
    for (const CLI::Option* option : app.get_options()) {
      if (option->get_group().empty()) continue;  // hidden
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  } else {
    for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  }
  return names;
}

// The first word that no option consumed.
std::string first_leftover(const CLI::App& app, int argc, const char* const* argv) {
  const std::vector<std::string> leftovers = app.remaining(/*recurse=*/true);
  for (int i = 1; i < argc; ++i) {
    if (std::find(leftovers.begin(), leftovers.end(), argv[i]) != leftovers.end()) return argv[i];
  }
  return leftovers.empty() ? "" : leftovers.front();
}

// Null if no command was named.
const CLI::App* command_of(const CLI::App& app) {
  const std::vector<CLI::App*> named = app.get_subcommands();
  return named.empty() ? nullptr : named.front();
}

// Describes the error in plainer words than CLI11.
std::string describe(const CLI::ParseError& error, const CLI::App& app,
                     const std::string& leftover) {
  const CLI::App* command = command_of(app);
  std::string message = error.what();
  if (!leftover.empty()) {
    const std::string name = leftover.substr(0, leftover.find('='));
    return (command != nullptr ? "unknown option or argument \"" : "unknown command or option \"") +
           leftover + "\"" +
           suggestion(name, names_like(name, command != nullptr ? *command : app));
  }
  if (command == nullptr) return "a command is required";
  const size_t colon = message.find(": ");
  if (colon == std::string::npos) return message;
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    const std::string name = message.substr(0, colon);
    const CLI::Option* option = command->get_option_no_throw(name);
    const bool is_repeated = option != nullptr && option->count() > 1;
    return name + (is_repeated ? " must be given once, not " + std::to_string(option->count()) +
                                     " times; keep one value"
                               : " needs a value");
  }
  if (message.compare(colon, 6, ": must") == 0) message.erase(colon, 1);
  return message;
}

}  // namespace

bool CommandLine::wants_json() const {
  if (run.json || verify.json || plan.json || mesh.json || bench.json || bench.format == "json" ||
      info.json) {
    return true;
  }
  // The options of a line that could not be read may be missing.
  return !complaint.empty() && std::ranges::find(words, "--json") != words.end();
}

CommandLine read_command_line(int argc, const char* const* argv) {
  CommandLine line;
  Parser parser(line);
  CLI::App& app = parser.app();
  line.words.assign(argv + 1, argv + argc);
  line.run.words = line.words;
  line.bench.words = line.words;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      std::ostringstream help;
      app.exit(error, help, help);
      line.help = help.str();
    } else {
      line.complaint = describe(error, app, first_leftover(app, argc, argv));
    }
  }
  if (const CLI::App* command = command_of(app)) line.command = command->get_name();
  if (line.help.empty() && line.complaint.empty()) line.help = parser.text_of(line.command);
  // CLI11 leaves an empty line for options that it does not show.
  if (const size_t gap = line.help.find("\n\n\n"); gap != std::string::npos) {
    line.help.erase(gap, 1);
  }
  return line;
}

}  // namespace crossdock::cli
