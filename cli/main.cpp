#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>

#include "cli/command_line.hpp"
#include "cli/json_writer.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/processes/parent_watch.hpp"
#include "cli/processes/rank_launcher.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/terminal.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

constexpr int kBadArguments = 2;
constexpr std::chrono::seconds kComplaintDeadline{10};

// Commands that one process executes alone, even in a job of several.
bool is_for_one(const CommandLine& line) {
  return line.command == "eval" || line.command == "plan" || line.command == "mesh" ||
         line.command == "info" || line.bench.list || line.verify.list;
}

// The communicators on the command line.
std::vector<std::string> communicators_named_in(const CommandLine& line) {
  if (line.command == "run") return wanted_communicators(line.run);
  return line.command == "bench" ? line.bench.communicators : line.verify.communicators;
}

// Processes with different commands or options would wait for each other in different calls.
void check_job(const CommandLine& line, const std::string& job) {
  if (line.complaint.empty()) {
    if (line.help.empty() && !is_for_one(line)) check_same_words(job, line.words);
    return;
  }
  try {
    check_same_words(job, line.words, kComplaintDeadline);
  } catch (const Error&) {
    // The other processes did not arrive; this process reports its complaint anyway.
  }
}

int run_command(const CommandLine& line, const std::string& job) {
  if (is_for_one(line) && !speaks_for_job(job)) return 0;
  if (line.command == "run") return run_run(line.run);
  if (line.command == "verify") {
    if (line.verify.random) return run_verify_random(line.verify);
    if (!line.verify.case_file.empty()) return run_verify_case_file(line.verify);
    return line.verify.faults ? run_verify_faults(line.verify) : run_verify(line.verify);
  }
  if (line.command == "eval") return run_eval(line.eval);
  if (line.command == "plan") return run_plan(line.plan);
  if (line.command == "mesh") return run_mesh(line.mesh);
  if (line.command == "bench") return run_bench(line.bench);
  return run_info(line.info);
}

// `job`: see launched_communicator.
int run(const CommandLine& line, const std::string& job, const std::string& name) {
  try {
    check_job(line, job);
    if (!line.complaint.empty()) throw ArgumentError(line.complaint);
    if (line.help.empty()) return run_command(line, job);
    if (speaks_for_job(job)) std::cout << line.help;
    return 0;
  } catch (const ArgumentError& error) {
    if (speaks_for_job(job)) {
      std::cerr << wrap(name + ": " + error.what(), message_width(), 2) << "\nRun `" << name
                << " --help` for usage.\n";
    }
    return kBadArguments;
  }
}

}  // namespace
}  // namespace crossdock::cli

int main(int argc, char** argv) {
  if (crossdock::cli::is_rank_launcher(argc, argv)) return crossdock::cli::launch_ranks(argc, argv);
  // A file beyond its size limit (ulimit -f) is an error to report, not a signal.
  std::signal(SIGXFSZ, SIG_IGN);
  crossdock::cli::watch_parent();
  std::string name = "crossdock";
  bool wants_json = false;
  try {
    const crossdock::cli::CommandLine line = crossdock::cli::read_command_line(argc, argv);
    const std::string job =
        crossdock::cli::launched_communicator(crossdock::cli::communicators_named_in(line));
    wants_json = line.wants_json() && job.empty();
    if (!line.command.empty()) name += " " + line.command;
    const int status = crossdock::cli::run(line, job, name);
    if (status == 0 && (!std::cout.flush() || std::fflush(stdout) != 0)) {
      std::fprintf(stderr, "%s: cannot write to standard output\n", name.c_str());
      return 1;
    }
    return status;
  } catch (const std::exception& error) {
    if (wants_json) {
      std::cout << crossdock::cli::error_json(error.what()) << std::endl;
    } else {
      const int width = crossdock::cli::message_width();
      std::cerr << crossdock::cli::wrap(name + ": " + error.what(), width, 2) << std::endl;
    }
    return 1;
  }
}
