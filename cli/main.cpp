#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>

#include "commands.hpp"
#include "crossdock/build.hpp"

namespace {

constexpr int kBadArguments = 2;

constexpr const char* kExamples = R"(Examples:
  crossdock info                                what is built in and what works on this machine
  crossdock eval examples/cases/demo.json       run a case, print rows, outputs and gradients
  crossdock eval --check - < case.json          the same from standard input, checked

Exit status: 0, or 1 if a command failed, or 2 for bad command-line arguments.)";

constexpr const char* kEvalNotes =
    R"(The result is one JSON object on standard output. If anything is wrong with the case, that is
{"error": message} alone, and the exit status is 1. docs/case_format.md describes both.

Examples:
  crossdock eval examples/cases/demo.json
  crossdock eval --check examples/cases/demo.json > result.json)";

// Prints help and version to standard output, complaints to standard error.
int report(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return app.exit(error);
  const auto* command = app.get_subcommands().empty() ? &app : app.get_subcommands().front();
  const std::string name = command == &app ? "crossdock" : "crossdock " + command->get_name();
  std::string message = error.what();
  if (command == &app && !app.remaining().empty()) {
    message = "unknown command or option \"" + app.remaining().front() + "\"";
  } else if (command == &app) {
    message = "a command is required";
  }
  std::cerr << name << ": " << message << "\nRun `" << name << " --help` for usage.\n";
  return kBadArguments;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace crossdock;
  CLI::App app(
      "Expert parallelism for Mixture-of-Experts models: tokens to their experts and back.",
      "crossdock");
  app.set_version_flag("--version", "crossdock " + std::string(describe_build().version));
  app.require_subcommand(1);
  app.footer(kExamples);

  cli::InfoArgs info_args;
  CLI::App* info = app.add_subcommand("info", "What is built in and what works on this machine");
  info->add_flag("--json", info_args.json, "Print JSON");

  cli::EvalArgs eval_args;
  CLI::App* eval = app.add_subcommand("eval", "Run a small explicit case and print all results");
  eval->add_option("CASE", eval_args.path, "File with the case as JSON; - for standard input")
      ->required();
  eval->add_flag("--check", eval_args.check,
                 "Compare with the fp64 reference and say so on standard error; a difference is "
                 "exit status 1");
  eval->footer(kEvalNotes);

  try {
    app.parse(argc, argv);
    if (*info) return cli::run_info(info_args);
    return cli::run_eval(eval_args);
  } catch (const CLI::ParseError& e) {
    return report(app, e);
  } catch (const std::exception& e) {
    std::cerr << "crossdock: " << e.what() << "\n";
    return 1;
  }
}
