#include <algorithm>
#include <chrono>
#include <csignal>
#include <exception>
#include <iostream>

#include "cli/command_line.hpp"
#include "cli/json.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/processes/parent_watch.hpp"
#include "cli/processes/rank_failure.hpp"
#include "cli/processes/rank_launcher.hpp"
#include "cli/standard_streams.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/terminal.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

constexpr std::chrono::seconds kComplaintDeadline{10};

// Commands that one process executes alone, even in a job of several.
bool is_for_one(const CommandLine& line) {
  return (line.command == "eval" && !line.eval.as_rank) || line.command == "plan" ||
         line.command == "mesh" || line.command == "info" || line.bench.list || line.verify.list;
}

// The communicators on the command line.
std::vector<std::string> communicators_named_in(const CommandLine& line) {
  if (line.command == "run") return wanted_communicators(line.run);
  if (line.command == "eval" && line.eval.as_rank) return {line.eval.communicator};
  return line.command == "bench" ? line.bench.communicators : line.verify.communicators;
}

// Processes with different commands or options would wait for each other in different calls.
void check_job(const CommandLine& line, const std::string& job) {
  if (line.complaint.empty()) {
    if (!is_for_one(line)) check_same_words(job, line.words);
    return;
  }
  try {
    check_same_words(job, line.words, kComplaintDeadline);
  } catch (const Error&) {
    // The other processes did not arrive; this process reports its complaint anyway.
  }
}

int run_verify_of(const VerifyArgs& args) {
  if (args.random) return run_verify_random(args);
  if (args.seed || args.first || !args.output.empty()) {
    throw ArgumentError("--seed, --first and --output are for random cases; add --random N");
  }
  if (!args.case_file.empty()) return run_verify_case_file(args);
  return args.faults ? run_verify_faults(args) : run_verify(args);
}

int run_command(const CommandLine& line, const std::string& job) {
  if (is_for_one(line) && !speaks_for_job(job)) return 0;
  if (line.command == "run") return run_run(line.run);
  if (line.command == "verify") return run_verify_of(line.verify);
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
    return run_command(line, job);
  } catch (const ArgumentError& error) {
    if (speaks_for_job(job)) {
      if (line.wants_json()) {
        std::cout << error_json(error.what()) << std::endl;
        return kBadArguments;
      }
      std::cerr << wrap(name + ": " + error.what(), message_width(), 2) << "\nRun `" << name
                << " --help` for usage.\n";
    }
    return kBadArguments;
  }
}

// What a report of a failure needs to know.
struct Speaker {
  std::string name = "crossdock";  // the program and its command
  std::string job{};               // of which this process is a rank; empty: none
  bool wants_json = false;
};

void print_failure(const Speaker& speaker, const std::string& message) {
  std::cerr << wrap(speaker.name + ": " + message, message_width(), 2) << std::endl;
}

void report(const Speaker& speaker, const std::exception& failure) {
  const std::string message = failure.what();
  const bool is_rank = !speaker.job.empty();
  const int rank = is_rank ? rank_in_job(speaker.job) : -1;
  if (is_rank && is_rank_of_command()) {
    const auto* error = dynamic_cast<const Error*>(&failure);
    report_to_command({.rank = rank,
                       .culprit = error != nullptr ? error->context().culprit : -1,
                       .message = message});
    return;
  }
  bool is_said = false;
  if (speaker.wants_json && (!is_rank || rank == 0)) {
    std::cout << error_json(message) << std::endl;
    is_said = flush_output();
  }
  const std::string prefix = is_rank && rank >= 0 ? "rank " + std::to_string(rank) : "";
  // Errors of a group begin with the rank.
  const bool has_prefix = prefix.empty() || message.starts_with(prefix + " ");
  if (!is_said || is_rank) print_failure(speaker, has_prefix ? message : prefix + ": " + message);
}

// Help, the version, completions and man pages need no other process.
int print_help(const CommandLine& line) {
  std::cout << line.help;
  return 0;
}

int run_in_job(Speaker& speaker, const CommandLine& line) {
  const std::string job = launched_communicator(communicators_named_in(line));
  if (!is_for_one(line)) {
    speaker.job = job;
    const std::string note = note_on_environment(communicators_named_in(line));
    if (!note.empty()) print_failure(speaker, note);
  }
  return run(line, job, speaker.name);
}

int run_as(Speaker& speaker, int argc, char** argv) {
  const CommandLine line = read_command_line(argc, argv);
  if (!line.command.empty()) speaker.name += " " + line.command;
  speaker.wants_json = line.wants_json();
  const int status = line.help.empty() ? run_in_job(speaker, line) : print_help(line);
  if (flush_output()) return status;
  print_failure(speaker, "cannot write to standard output");
  return std::max(status, kFailure);
}

}  // namespace
}  // namespace crossdock::cli

int main(int argc, char** argv) {
  crossdock::cli::open_missing_streams();
  if (crossdock::cli::is_rank_launcher(argc, argv)) return crossdock::cli::launch_ranks(argc, argv);
  // A file beyond its size limit (ulimit -f) is an error to report, not a signal.
  std::signal(SIGXFSZ, SIG_IGN);
  crossdock::cli::watch_parent();
  crossdock::cli::Speaker speaker;
  try {
    return crossdock::cli::run_as(speaker, argc, argv);
  } catch (const std::exception& failure) {
    crossdock::cli::report(speaker, failure);
    return crossdock::cli::kFailure;
  }
}
