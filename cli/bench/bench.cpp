#include <algorithm>
#include <chrono>
#include <iostream>

#include "bench/memory.hpp"
#include "bench/runner.hpp"
#include "cli/bench/printer.hpp"
#include "cli/bench/report.hpp"
#include "cli/bench/results_json.hpp"
#include "cli/commands.hpp"
#include "cli/machine.hpp"
#include "cli/processes/interruption.hpp"
#include "cli/processes/launch.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/text/log.hpp"
#include "cli/text/progress_line.hpp"
#include "cli/text/suggestion.hpp"
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
          .ranks_per_node = args.ranks_per_node,
          .group = printing_options()};
}

// Rethrows the library's errors about bad arguments as ArgumentError.
template <typename Call>
auto as_arguments(const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw ArgumentError(error.what());
    throw;
  }
}

bench::Sizes sizes_in(const BenchArgs& args) {
  // No machine fits larger sizes.
  constexpr int64_t kMost = int64_t{1} << 30;
  return as_arguments([&] {
    bench::Sizes sizes{
        .ranks = bench::parse_sizes({.name = "--ranks", .largest = kMaxRanks}, args.ranks),
        .tokens = bench::parse_sizes({.name = "--tokens", .largest = kMost}, args.tokens),
        .width = bench::parse_sizes({.name = "--width", .largest = kMost}, args.width),
        .top_k = bench::parse_sizes({.name = "--top-k", .largest = kMost}, args.top_k),
        .experts = bench::parse_sizes({.name = "--experts", .largest = kMost}, args.experts)};
    for (const std::string& name : args.dtypes) sizes.dtypes.push_back(parse_dtype(name));
    return sizes;
  });
}

BenchFormat format_of(const BenchArgs& args) {
  if (args.json) {
    if (args.format.empty()) return BenchFormat::kResults;
    throw ArgumentError("--json and --format " + args.format +
                        " must not be given together; leave one of them out");
  }
  if (args.format == "csv") return BenchFormat::kCsv;
  if (args.format == "markdown") return BenchFormat::kMarkdown;
  return args.format == "json" ? BenchFormat::kJson : BenchFormat::kTable;
}

// Suggests the name that was meant, and names the command that lists all of them.
void check_names(const BenchArgs& args) {
  std::vector<std::string> scenarios;
  for (const bench::Scenario& one : bench::scenarios()) scenarios.push_back(one.name);
  for (const std::string& name : args.scenarios) {
    const auto is_selected = [&](const std::string& one) {
      return name.ends_with('*') ? one.starts_with(name.substr(0, name.size() - 1)) : one == name;
    };
    if (std::ranges::any_of(scenarios, is_selected)) continue;
    throw ArgumentError(unknown_name("scenario", name, scenarios, "crossdock bench --list"));
  }
}

// The scenarios of the device that these names and patterns select.
std::vector<std::string> scenarios_on(const std::string& device,
                                      const std::vector<std::string>& names) {
  const bool on_gpu = device == "cuda";
  std::vector<std::string> selected;
  for (const std::string& name : names) {
    const size_t num_before = selected.size();
    for (const bench::Scenario& one : bench::find_scenarios({name})) {
      if (one.runs_on_gpu() == on_gpu) selected.push_back(one.name);
    }
    if (selected.size() > num_before) continue;
    std::string error = "scenario " + name;
    error += on_gpu ? " runs on the CPU" : " runs on GPUs";
    error += ", but --device is " + device;
    throw ArgumentError(error + "; give --device " + (on_gpu ? "cpu" : "cuda"));
  }
  return selected;
}

// Empty: the CPU's default scenarios. `sizes` other than the number of ranks make a scenario.
std::vector<std::string> wanted_scenarios(const BenchArgs& args, const bench::Sizes& sizes) {
  if (!args.scenarios.empty()) return scenarios_on(args.device, args.scenarios);
  const bool on_gpu = args.device == "cuda";
  if (sizes.any_but_ranks()) return {on_gpu ? "custom-cuda" : "custom"};
  return on_gpu ? std::vector<std::string>{"h200-*"} : std::vector<std::string>{};
}

// Whether some scenario is measured at several sizes.
bool has_sweep(const std::vector<Case>& cases) {
  const auto is_same = [](const Case& a, const Case& b) {
    return a.scenario.name == b.scenario.name && a.strategy == b.strategy &&
           a.communicator == b.communicator;
  };
  return std::ranges::adjacent_find(cases, is_same) != cases.end();
}

BenchPrinter make_printer(const BenchArgs& args, const std::vector<Case>& cases) {
  const bool uses_gpu =
      std::ranges::any_of(cases, [](const Case& one) { return one.scenario.runs_on_gpu(); });
  return {format_of(args), describe_run(args, uses_gpu), has_sweep(cases), cases};
}

int print_list(const BenchArgs& args) {
  const BenchFormat format = format_of(args);
  if (format == BenchFormat::kCsv || format == BenchFormat::kMarkdown) {
    throw ArgumentError("--list prints a table or JSON, so --format must be table or json, got " +
                        args.format);
  }
  if (format == BenchFormat::kTable) {
    std::cout << scenarios_text(bench::scenarios(), output_style());
  } else {
    std::cout << cli::to_json(bench::scenarios()) << "\n";
  }
  return 0;
}

bench::Selection selection_of(const BenchArgs& args, const bench::Sizes& sizes,
                              const std::vector<std::string>& communicators) {
  return {.scenarios = wanted_scenarios(args, sizes),
          .strategies = args.strategies,
          .communicators = communicators,
          .sizes = sizes,
          .max_sms = args.max_sms,
          .copies = parse_copies(args.copies)};
}

// This process is one of the ranks.
int run_as_rank(const BenchArgs& args, const std::string& communicator) {
  Group group(make_job_communicator(communicator, {.ranks_per_node = args.ranks_per_node,
                                                   .max_in_flight = args.max_in_flight}),
              printing_options());
  bench::Sizes sizes = sizes_in(args);
  check_against_job(group.communicator(), args.communicators,
                    {sizes.ranks.begin(), sizes.ranks.end()});
  sizes.ranks = {group.size()};
  const std::vector<Case> cases =
      as_arguments([&] { return select_cases(selection_of(args, sizes, {communicator})); });
  BenchPrinter printer = make_printer(args, cases);
  const ProgressLine progress;
  const Position position(std::ssize(cases));
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& one = cases[i];
    if (group.rank() == 0) progress.show(position.text(static_cast<int64_t>(i), case_text(one)));
    if (one.communicator != communicator) {
      if (args.scenarios.empty()) continue;
      throw ArgumentError("scenario " + one.scenario.name + " has one rank; run it without " +
                          (communicator == "mpi" ? "mpirun" : "a launcher"));
    }
    try {
      const Result result = bench::run_case(one, group, run_options(args));
      if (group.rank() == 0) {
        progress.show("");
        printer.add(one.scenario, result);
      }
    } catch (const Error& error) {
      if (group.rank() == 0) printer.abandon();
      if (error.code() != ErrorCode::kCapacity || group.rank() == 0) throw;
      return 1;  // all ranks agreed that memory is short; rank 0 reports it
    }
  }
  if (group.rank() == 0) printer.finish();
  return 0;
}

std::vector<std::string> arguments_of_ranks(const BenchArgs& args, const Case& one) {
  std::vector<std::string> list = {"bench",
                                   "--json",
                                   "--scenario",
                                   one.scenario.name,
                                   "--device",
                                   args.device,
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
  if (args.max_sms && one.scenario.runs_on_gpu()) {
    list.insert(list.end(), {"--max-sms", std::to_string(*args.max_sms)});
  }
  if (one.scenario.copies != Copies::kAuto) list.insert(list.end(), {"--copies", args.copies});
  if (sizes_in(args).any_but_ranks()) {
    const bench::Scenario& s = one.scenario;
    list.insert(list.end(),
                {"--tokens", std::to_string(s.tokens), "--width", std::to_string(s.width),
                 "--experts", std::to_string(s.experts), "--top-k", std::to_string(s.top_k),
                 "--dtype", std::string(name_of(s.dtype))});
  }
  return list;
}

std::vector<Result> run_one(const BenchArgs& args, const Case& one) {
  if (!bench::has_processes(one)) return {bench::run_case(one, run_options(args))};
  return parse_results(run_processes({.communicator = one.communicator,
                                      .ranks = one.scenario.ranks,
                                      .args = arguments_of_ranks(args, one),
                                      .limit = kLimitOfRanks,
                                      .on_progress = [](const RankProgress&) {}}));
}

void run_all(const BenchArgs& args, const std::vector<Case>& cases, BenchPrinter& printer) {
  const ProgressLine progress;
  const Position position(std::ssize(cases));
  Interruption interruption([&] {
    progress.show("");
    printer.interrupt();
  });
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& one = cases[i];
    progress.show(position.text(static_cast<int64_t>(i), case_text(one)));
    const std::vector<Result> results = run_one(args, one);
    progress.show("");
    interruption.change([&] {
      for (const Result& result : results) printer.add(one.scenario, result);
    });
  }
}

}  // namespace

int run_bench(const BenchArgs& args) {
  if (args.list) return print_list(args);
  format_of(args);  // throws if options contradict each other
  check_names(args);
  if (const std::string job = launched_communicator(args.communicators); !job.empty()) {
    return run_as_rank(args, job);
  }
  std::vector<std::string> communicators = args.communicators;
  if (communicators.empty() && find_program("mpirun").empty()) communicators = {"threads"};
  const std::vector<Case> cases =
      as_arguments([&] { return select_cases(selection_of(args, sizes_in(args), communicators)); });
  // Do not start a sweep that the machine cannot finish.
  for (const Case& one : cases) {
    if (!one.scenario.runs_on_gpu()) bench::check_memory(one.scenario);
  }
  BenchPrinter printer = make_printer(args, cases);
  try {
    run_all(args, cases, printer);
  } catch (...) {
    printer.abandon();
    throw;
  }
  printer.finish();
  return 0;
}

}  // namespace crossdock::cli
