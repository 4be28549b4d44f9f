#include <algorithm>
#include <iostream>

#include "bench/runner.hpp"
#include "cli/bench/report.hpp"
#include "cli/commands.hpp"
#include "cli/machine.hpp"
#include "cli/processes/launch.hpp"
#include "cli/processes/launched_job.hpp"
#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cli {
namespace {

using bench::Case;
using bench::Result;

constexpr std::chrono::seconds kLimitOfRanks{600};

bench::RunOptions run_options(const BenchArgs& args) {
  return {.repeats = {.warm_up = args.warm_up, .timed = args.repeat},
          .check = args.check,
          .ranks_per_node = args.ranks_per_node};
}

// Prints each table as soon as its result is there, or all results at the end as JSON.
class Report {
 public:
  explicit Report(bool json) : json_(json) {}

  void add(const bench::Scenario& scenario, const Result& result) {
    if (!json_) {
      if (results_.empty() || results_.back().scenario != scenario.name) {
        std::cout << head_text(scenario, style_);
      }
      std::cout << result_text(result, style_) << std::flush;
    }
    results_.push_back(result);
  }
  void finish() const {
    if (json_) std::cout << cli::to_json(results_) << "\n";
  }

 private:
  bool json_;
  TextStyle style_ = output_style();
  std::vector<Result> results_;
};

// Empty: the default ones of the CPU.
std::vector<std::string> wanted_scenarios(const BenchArgs& args) {
  if (args.scenarios.empty() && args.device == "cuda") return {"h200-*"};
  return args.scenarios;
}

// Unknown names are bad arguments.
std::vector<Case> select(const bench::Selection& selection) {
  try {
    return bench::select_cases(selection);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw ArgumentError(error.what());
    throw;
  }
}

// This process is one of the ranks.
int run_as_rank(const BenchArgs& args, const std::string& communicator) {
  Group group(make_job_communicator(
      communicator, {.ranks_per_node = args.ranks_per_node, .max_in_flight = args.max_in_flight}));
  check_against_job(group.communicator(), args.communicators,
                    args.ranks > 0 ? std::vector<int>{args.ranks} : std::vector<int>{});
  const auto cases = select({.scenarios = wanted_scenarios(args),
                             .strategies = args.strategies,
                             .communicators = {communicator},
                             .ranks = group.size(),
                             .max_sms = args.max_sms});
  Report report(args.json);
  for (const Case& one : cases) {
    if (one.communicator != communicator) {
      if (args.scenarios.empty()) continue;
      throw ArgumentError("scenario " + one.scenario.name + " has one rank; run it without " +
                          (communicator == "mpi" ? "mpirun" : "a launcher"));
    }
    try {
      const Result result = bench::run_case(one, group, run_options(args));
      if (group.rank() == 0) report.add(one.scenario, result);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCapacity || group.rank() == 0) throw;
      return 1;  // all ranks agreed that memory is short; rank 0 reports it
    }
  }
  if (group.rank() == 0) report.finish();
  return 0;
}

std::vector<std::string> arguments_of_ranks(const BenchArgs& args, const Case& one) {
  std::vector<std::string> list = {"bench",
                                   "--json",
                                   "--scenario",
                                   one.scenario.name,
                                   "--communicator",
                                   one.communicator,
                                   "--repeat",
                                   std::to_string(args.repeat),
                                   "--warm-up",
                                   std::to_string(args.warm_up),
                                   "--ranks-per-node",
                                   std::to_string(args.ranks_per_node)};
  if (one.strategy != "none") list.insert(list.end(), {"--strategy", one.strategy});
  if (args.max_in_flight > 0) {
    list.insert(list.end(), {"--max-in-flight", std::to_string(args.max_in_flight)});
  }
  if (!args.check) list.emplace_back("--no-check");
  return list;
}

}  // namespace

int run_bench(const BenchArgs& args) {
  if (args.list) {
    if (args.json) {
      std::cout << to_json(bench::scenarios()) << "\n";
    } else {
      std::cout << scenarios_text(bench::scenarios(), output_style());
    }
    return 0;
  }
  if (const std::string job = launched_communicator(args.communicators); !job.empty()) {
    return run_as_rank(args, job);
  }
  Report report(args.json);
  std::vector<std::string> communicators = args.communicators;
  if (communicators.empty() && find_program("mpirun").empty()) communicators = {"threads"};
  const std::vector<Case> cases = select({.scenarios = wanted_scenarios(args),
                                          .strategies = args.strategies,
                                          .communicators = communicators,
                                          .ranks = args.ranks,
                                          .max_sms = args.max_sms});
  for (const Case& one : cases) {
    if (!bench::has_processes(one)) {
      report.add(one.scenario, bench::run_case(one, run_options(args)));
      continue;
    }
    const std::string output = run_processes({.communicator = one.communicator,
                                              .ranks = one.scenario.ranks,
                                              .args = arguments_of_ranks(args, one),
                                              .limit = kLimitOfRanks});
    for (const Result& result : parse_results(output)) report.add(one.scenario, result);
  }
  report.finish();
  return 0;
}

}  // namespace crossdock::cli
