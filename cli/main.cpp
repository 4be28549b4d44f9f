#include <cstdio>
#include <exception>
#include <iostream>

#include "command_line.hpp"
#include "launched_job.hpp"

namespace crossdock::cli {
namespace {

constexpr int kBadArguments = 2;

int run_command(const CommandLine& line) {
  if (line.command == "run") return run_run(line.run);
  if (line.command == "verify") {
    return line.verify.faults ? run_verify_faults(line.verify) : run_verify(line.verify);
  }
  if (line.command == "eval") return run_eval(line.eval);
  if (line.command == "plan") return run_plan(line.plan);
  if (line.command == "bench") return run_bench(line.bench);
  return run_info(line.info);
}

int run(const CommandLine& line, const std::string& name) {
  try {
    if (!line.complaint.empty()) throw ArgumentError(line.complaint);
    if (line.help.empty()) return run_command(line);
    if (speaks_for_job()) std::cout << line.help;
    return 0;
  } catch (const ArgumentError& error) {
    if (speaks_for_job()) {
      std::cerr << name << ": " << error.what() << "\nRun `" << name << " --help` for usage.\n";
    }
    return kBadArguments;
  }
}

}  // namespace
}  // namespace crossdock::cli

int main(int argc, char** argv) {
  std::string name = "crossdock";
  try {
    const crossdock::cli::CommandLine line = crossdock::cli::read_command_line(argc, argv);
    if (!line.command.empty()) name += " " + line.command;
    const int status = crossdock::cli::run(line, name);
    if (status == 0 && (!std::cout.flush() || std::fflush(stdout) != 0)) {
      std::fprintf(stderr, "%s: cannot write to standard output\n", name.c_str());
      return 1;
    }
    return status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
    return 1;
  }
}
