#include <algorithm>
#include <iostream>

#include "cli/commands.hpp"
#include "cli/device/rank_device.hpp"
#include "cli/json.hpp"
#include "cli/machine.hpp"
#include "cli/processes/interruption.hpp"
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

std::string text_of(const VerifyCell& cell) {
  return cell.strategy + ", " + counted(cell.ranks, "rank") + " (" + cell.communicator + ")";
}

void list(const VerifyArgs& args, const std::vector<Check>& checks) {
  if (!args.json) {
    for (const Check& check : checks) std::cout << check.name << "\n";
    return;
  }
  Json names = Json::array();
  for (const Check& check : checks) names.push_back(check.name);
  std::cout << json_text(names, 1) << "\n";
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
  const std::vector<std::string> strategies =
      args.strategies.empty() ? strategy_names() : args.strategies;
  const Position position(std::ssize(strategies) * std::ssize(checks));
  for (const std::string& strategy : strategies) {
    const VerifyCell cell{strategy, communicator, group.size(), args.ranks_per_node, args.device};
    const int64_t before = std::ssize(results) * std::ssize(checks);
    const auto progress = [&](int64_t number, const Check& check) {
      // The command that has started the ranks of a cell knows the position.
      const std::string words =
          is_rank_of_command() ? check.name
                               : position.text(before + number, text_of(cell) + "  " + check.name);
      line.show(words, number);
    };
    results.push_back(verify_on(group, cell, checks, progress));
    if (group.is_poisoned()) break;
  }
  return results;
}

void print(const VerifyArgs& args, const std::vector<VerifyResult>& results, double seconds) {
  if (!args.json && args.device == "cuda") std::cout << gpu_rule() << "\n\n";
  std::cout << (args.json ? to_json(results) + "\n" : to_text(results, seconds, output_style()))
            << std::flush;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::vector<VerifyResult> verify_all(const VerifyArgs& args, const std::vector<Check>& checks) {
  const auto begin = std::chrono::steady_clock::now();
  const ProgressLine line;
  const std::vector<VerifyCell> cells = cells_of(args);
  const int64_t num_checks = std::ssize(checks);
  const Position position(std::ssize(cells) * num_checks);
  std::vector<VerifyResult> results;
  Interruption interruption([&] {
    line.show("");
    if (results.empty()) return;
    print(args, results, seconds_since(begin));
    std::cerr << "interrupted after " << results.size() << " of " << cells.size()
              << " combinations\n";
  });
  for (size_t i = 0; i < cells.size(); ++i) {
    const VerifyCell& cell = cells[i];
    const auto show = [&](int64_t number, const std::string& check) {
      line.show(position.text(static_cast<int64_t>(i) * num_checks + number,
                              text_of(cell) + "  " + check));
    };
    show(0, "");
    std::vector<VerifyResult> ended;
    if (cell.communicator == "threads") {
      ended = {verify_on_threads(
          cell, checks, [&](int64_t number, const Check& check) { show(number, check.name); })};
    } else {
      ended = parse_verify_results(run_processes(
          {.communicator = cell.communicator,
           .ranks = cell.ranks,
           .args = arguments_of_ranks(args, cell),
           .limit = kLimitOfRanks,
           .on_progress = [&](const RankProgress& rank) { show(rank.done, rank.words); }}));
    }
    interruption.change([&] { std::ranges::move(ended, std::back_inserter(results)); });
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
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<VerifyResult> results =
      group ? verify_as_rank(args, *group, checks) : verify_all(args, checks);
  if (!group || group->rank() == 0) print(args, results, seconds_since(begin));
  // Rank 0 has printed why, if it could.
  if (group && group->rank() != 0 && !args.always_zero) group->check();
  const bool passed = std::all_of(results.begin(), results.end(),
                                  [](const auto& result) { return result.passed(); });
  return passed || args.always_zero ? 0 : 1;
}

}  // namespace crossdock::cli
