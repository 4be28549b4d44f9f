#include "cli/command_line.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <sstream>

#include "cli/options.hpp"
#include "cli/text/layout.hpp"
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

Exit status: 0, 1 if a command failed, 2 for bad command-line arguments.

Environment: COLUMNS sets the width of the text, NO_COLOR turns colour off,
CLICOLOR_FORCE=1 turns it on without a terminal.)";

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

template <typename Args>
void add_command(CLI::App& app, const char* name, const char* words, Args& args) {
  Options options(*app.add_subcommand(name, words)->group("Commands"));
  add_options(options, args);
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
std::string describe(const CLI::ParseError& error, const CLI::App* command,
                     const std::string& leftover) {
  std::string message = error.what();
  if (!leftover.empty()) {
    return (command != nullptr ? "unknown option or argument \"" : "unknown command or option \"") +
           leftover + "\"";
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
  return run.json || verify.json || plan.json || mesh.json || bench.json ||
         bench.format == "json" || info.json;
}

CommandLine read_command_line(int argc, const char* const* argv) {
  CLI::App app("Expert parallelism for Mixture-of-Experts models.", "crossdock");
  const auto formatter = std::make_shared<HelpFormatter>();
  formatter->label("SUBCOMMAND", "COMMAND");
  app.formatter(formatter);
  app.set_version_flag("--version", "crossdock " + std::string(describe_build().version));
  app.require_subcommand(1);
  app.footer(kNotes);
  CommandLine line;
  add_command(app, "run", "Run an MoE layer, timed and checked", line.run);
  add_command(app, "verify", "Check strategies and communicators against the reference",
              line.verify);
  add_command(app, "eval", "Run a small explicit case and print all results", line.eval);
  add_command(app, "plan", "Show what a job needs, before it starts", line.plan);
  add_command(app, "mesh", "Show the groups of a mesh and every rank's coordinates", line.mesh);
  add_command(app, "bench", "Measure steps and compare them with a memory copy", line.bench);
  add_command(app, "info", "Show what is built and what works on this machine", line.info);
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
      // CLI11 leaves an empty line for options that it does not show.
      if (const size_t gap = line.help.find("\n\n\n"); gap != std::string::npos) {
        line.help.erase(gap, 1);
      }
    } else {
      const CLI::App* command = command_of(app);
      line.complaint = describe(error, command, first_leftover(app, argc, argv));
    }
  }
  if (const CLI::App* command = command_of(app)) line.command = command->get_name();
  return line;
}

}  // namespace crossdock::cli
