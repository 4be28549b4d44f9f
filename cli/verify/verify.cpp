#include <algorithm>
#include <iostream>

#include "cli/commands.hpp"
#include "cli/device/rank_device.hpp"
#include "cli/json_writer.hpp"
#include "cli/machine.hpp"
#include "cli/processes/launch.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/progress_line.hpp"
#include "cli/text/wait_notice.hpp"
#include "cli/verify/report.hpp"
#include "cli/verify/run.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/extend/strategy_list.hpp"

namespace crossdock::cli {
namespace {

using conformance::Check;

constexpr std::chrono::seconds kLimitOfRanks{1200};

CheckProgress progress_of(const ProgressLine& line, const VerifyCell& cell, size_t count) {
  return [&line, cell, count](int64_t number, const Check& check) {
    line.show(cell.strategy + ", " + counted(cell.ranks, "rank") + " (" + cell.communicator +
              "): " + std::to_string(number) + " of " + std::to_string(count) + "  " + check.name);
  };
}

void list(const VerifyArgs& args, const std::vector<Check>& checks) {
  if (!args.json) {
    for (const Check& check : checks) std::cout << check.name << "\n";
    return;
  }
  JsonWriter writer(1);
  writer.begin_array();
  for (const Check& check : checks) writer.value(std::string_view(check.name));
  writer.end_array();
  std::cout << writer.text() << "\n";
}

std::vector<std::string> arguments_of_ranks(const VerifyArgs& args, const VerifyCell& cell) {
  std::vector<std::string> list = {"verify",      "--json",         "--always-zero",  "--strategy",
                                   cell.strategy, "--communicator", cell.communicator};
  const auto add = [&](const char* option, const std::vector<std::string>& values) {
    for (const std::string& value : values) list.insert(list.end(), {option, value});
  };
  add("--case", args.cases);
  add("--dtype", args.dtypes);
  if (args.quick) list.emplace_back("--quick");
  list.insert(list.end(), {"--device", cell.device});
  if (args.ranks_per_node > 0) {
    list.insert(list.end(), {"--ranks-per-node", std::to_string(args.ranks_per_node)});
  }
  return list;
}

// The cells to run if this process was started alone.
std::vector<VerifyCell> cells_of(const VerifyArgs& args) {
  std::vector<std::string> communicators = args.communicators;
  if (communicators.empty()) {
    communicators = {"threads"};
  }
  if (args.communicators.empty() && args.device == "cpu") {
    if (mpi_is_built() && !find_program("mpirun").empty()) communicators.emplace_back("mpi");
    communicators.emplace_back("sockets");
  }
  std::vector<VerifyCell> cells;
  for (const std::string& strategy : args.strategies.empty() ? strategy_names() : args.strategies) {
    for (const std::string& communicator : communicators) {
      for (const int ranks : args.ranks.empty() ? std::vector<int>{1, 2, 4, 7} : args.ranks) {
        cells.push_back({strategy, communicator, ranks, args.ranks_per_node, args.device});
      }
    }
  }
  return cells;
}

// This process is one of the ranks.
std::vector<VerifyResult> verify_as_rank(const VerifyArgs& args, Group& group,
                                         const std::vector<Check>& checks) {
  check_against_job(group.communicator(), args.communicators, args.ranks);
  const std::string communicator(group.communicator().name());
  const ProgressLine line;
  std::vector<VerifyResult> results;
  for (const std::string& strategy : args.strategies.empty() ? strategy_names() : args.strategies) {
    const VerifyCell cell{strategy, communicator, group.size(), args.ranks_per_node, args.device};
    results.push_back(verify_on(group, cell, checks, progress_of(line, cell, checks.size())));
    if (group.is_poisoned()) break;
  }
  return results;
}

std::vector<VerifyResult> verify_all(const VerifyArgs& args, const std::vector<Check>& checks) {
  const ProgressLine line;
  std::vector<VerifyResult> results;
  for (const VerifyCell& cell : cells_of(args)) {
    if (cell.communicator == "threads") {
      results.push_back(verify_on_threads(cell, checks, progress_of(line, cell, checks.size())));
      continue;
    }
    line.show(cell.strategy + ", " + counted(cell.ranks, "rank") + " (" + cell.communicator + ")");
    const std::string output = run_processes({.communicator = cell.communicator,
                                              .ranks = cell.ranks,
                                              .args = arguments_of_ranks(args, cell),
                                              .limit = kLimitOfRanks});
    for (VerifyResult& result : parse_verify_results(output)) results.push_back(std::move(result));
  }
  return results;
}

}  // namespace

int run_verify(const VerifyArgs& args) {
  const std::vector<Check> checks = select_checks(
      {.names = args.cases, .dtypes = args.dtypes, .is_quick = args.quick}, args.device);
  if (checks.empty()) {
    throw ArgumentError("no check matches; `crossdock verify --list` shows all names");
  }
  if (args.list) {
    list(args, checks);
    return 0;
  }
  if (args.device == "cuda") prepare_gpus();
  std::unique_ptr<Group> group;
  if (const std::string job = launched_communicator(args.communicators); !job.empty()) {
    group =
        std::make_unique<Group>(make_job_communicator(job, {.ranks_per_node = args.ranks_per_node}),
                                GroupOptions{.on_wait = print_wait_notice});
  }
  const std::vector<VerifyResult> results =
      group ? verify_as_rank(args, *group, checks) : verify_all(args, checks);
  if (!group || group->rank() == 0) {
    if (!args.json && args.device == "cuda") std::cout << gpu_rule() << "\n\n";
    std::cout << (args.json ? to_json(results) + "\n" : to_text(results, output_style()))
              << std::flush;
  }
  // Rank 0 has printed why, if it could.
  if (group && group->rank() != 0 && !args.always_zero) group->check();
  const bool passed = std::all_of(results.begin(), results.end(),
                                  [](const auto& result) { return result.passed(); });
  return passed || args.always_zero ? 0 : 1;
}

}  // namespace crossdock::cli
