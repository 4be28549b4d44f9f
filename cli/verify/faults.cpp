#include "crossdock/testing/faults.hpp"

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/commands.hpp"
#include "cli/machine.hpp"
#include "cli/processes/launch.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/progress_line.hpp"
#include "cli/text/table.hpp"
#include "cli/verify/run.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/extend/strategy_list.hpp"

namespace crossdock::cli {
namespace {

using conformance::FaultCase;
using conformance::FaultKind;
using conformance::FaultOutcome;
using nlohmann::json;

constexpr int kRanks = 4;
constexpr int kCulprit = 2;
constexpr std::chrono::seconds kDeadline{2};         // of the group in which the fault happens
constexpr std::chrono::seconds kOuterDeadline{120};  // of the group that collects the results
constexpr std::chrono::seconds kLimitOfRanks{1200};

GroupOptions outer_options() {
  return {.arrival_deadline = kOuterDeadline, .progress_deadline = kOuterDeadline};
}

bool kills(const FaultCase& fault) {
  return fault.kind == FaultKind::kKilled;
}

std::vector<FaultCase> select(const VerifyArgs& args) {
  std::vector<FaultCase> cases = conformance::list_faults(
      args.strategies.empty() ? strategy_names() : args.strategies, kCulprit);
  std::set<std::string> names;
  for (const FaultCase& fault : cases) names.insert(fault.name());
  std::erase_if(cases, [&](const FaultCase& fault) {
    const auto is_selected = [&](const std::string& part) {
      return names.contains(part) ? fault.name() == part : matches(fault.name(), part);
    };
    return !args.cases.empty() && std::none_of(args.cases.begin(), args.cases.end(), is_selected);
  });
  return cases;
}

void list(const std::vector<FaultCase>& cases, bool as_json) {
  json names = json::array();
  for (const FaultCase& fault : cases) names.push_back(fault.name());
  if (as_json) {
    std::cout << names.dump(1) << "\n";
    return;
  }
  for (const json& name : names) std::cout << name.get<std::string>() << "\n";
}

// The ranks that can still report how a case ended.
std::unique_ptr<Group> survivors_of(Group& group, const FaultCase& fault) {
  std::vector<int> members;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != fault.culprit) members.push_back(rank);
  }
  return group.subgroup(members);
}

// Runs a case and collects the outcomes of all ranks; complete on rank 0.
json run_case(Group& group, const FaultCase& fault) {
  const FaultOutcome outcome = conformance::run_fault(group, fault, kDeadline);
  const std::unique_ptr<Group> survivors = kills(fault) ? survivors_of(group, fault) : nullptr;
  const bool survives = group.rank() != fault.culprit;
  const double latency_ms = std::chrono::duration<double, std::milli>(outcome.latency).count();
  const std::string own = json{{"rank", group.rank()},
                               {"findings", outcome.findings},
                               {"message", outcome.message},
                               {"latency_ms", survives ? latency_ms : 0.0}}
                              .dump();
  Group& speakers = survivors ? *survivors : group;
  const Agreement all =
      speakers.agree({.operation = "verify_faults", .body = std::as_bytes(std::span(own))});
  json result{{"case", fault.name()},     {"communicator", group.communicator().name()},
              {"ranks", group.size()},    {"passed", true},
              {"latency_ms", 0.0},        {"message", ""},
              {"findings", json::array()}};
  for (int speaker = 0; speaker < speakers.size(); ++speaker) {
    const auto body = all.body(speaker);
    const json one =
        json::parse(std::string(reinterpret_cast<const char*>(body.data()), body.size()));
    result["latency_ms"] =
        std::max(result["latency_ms"].get<double>(), one["latency_ms"].get<double>());
    const int rank = one["rank"];
    if (rank == (fault.culprit == 0 ? 1 : 0)) result["message"] = one["message"];
    for (const auto& finding : one["findings"]) {
      result["passed"] = false;
      result["findings"].push_back("rank " + std::to_string(rank) + ": " +
                                   finding.get<std::string>());
    }
  }
  return result;
}

json run_cases(Group& group, const std::vector<FaultCase>& cases) {
  const ProgressLine line;
  json results = json::array();
  for (const FaultCase& fault : cases) {
    if (group.rank() == 0) line.show(fault.name());
    results.push_back(run_case(group, fault));
  }
  return results;
}

json run_on_threads(const std::vector<FaultCase>& cases) {
  json results;
  run_ranks(kRanks,
            [&](Group& group) {
              json own = run_cases(group, cases);
              if (group.rank() == 0) results = std::move(own);
            },
            {.ranks_per_node = 0, .group = outer_options()});
  return results;
}

// One job runs all cases without a death; every other case needs its own job.
json run_on_processes(const std::string& communicator, const std::vector<FaultCase>& cases) {
  const std::vector<std::string> head = {"verify",        "--faults",       "--json",
                                         "--always-zero", "--communicator", communicator};
  const auto job_of = [&](const std::vector<std::string>& arguments) {
    return ProcessJob{
        .communicator = communicator, .ranks = kRanks, .args = arguments, .limit = kLimitOfRanks};
  };
  std::vector<std::string> arguments = head;
  for (const FaultCase& fault : cases) {
    if (!kills(fault)) arguments.insert(arguments.end(), {"--case", fault.name()});
  }
  json results = json::array();
  if (arguments != head) results = json::parse(run_processes(job_of(arguments)));
  const ProgressLine line;
  for (const FaultCase& fault : cases) {
    if (!kills(fault)) continue;
    line.show(fault.name());
    arguments = head;
    arguments.insert(arguments.end(), {"--case", fault.name()});
    const std::string output = run_processes_with_a_death(job_of(arguments));
    const json ends = json::parse(output, nullptr, /*allow_exceptions=*/false);
    if (ends.is_array() && ends.size() == 1) {
      results.push_back(ends[0]);
    } else {
      results.push_back({{"case", fault.name()},
                         {"communicator", communicator},
                         {"ranks", kRanks},
                         {"passed", false},
                         {"latency_ms", 0.0},
                         {"message", ""},
                         {"findings", {"the survivors did not finish"}}});
    }
  }
  return results;
}

std::string to_text(const json& results, const TextStyle& style) {
  std::string text;
  bool is_first = true;
  ptrdiff_t num_passed = 0;
  for (const json& result : results) {
    const bool passed = result["passed"];
    Table table(style,
                {{"fault", Align::kLeft, 45},
                 {"communicator", Align::kLeft},
                 {"result", Align::kLeft, 6},
                 {"latency", Align::kRight, 10}},
                /*indent=*/0);
    table.add_row({result["case"].get<std::string>(),
                   result["communicator"].get<std::string>(),
                   {passed ? "named" : "FAILED", passed ? Colour::kGreen : Colour::kRed},
                   fixed(result["latency_ms"], 1) + " ms"});
    text += is_first ? table.text() : table.rows();
    is_first = false;
    num_passed += passed ? 1 : 0;
    for (const auto& finding : result["findings"]) {
      text += wrap("    " + finding.get<std::string>(), style.width, 4) + "\n";
    }
  }
  return text + wrap(std::to_string(num_passed) + " of " + counted(std::ssize(results), "fault") +
                         ": every survivor named rank " + std::to_string(kCulprit) +
                         " and the call, and continued without it\n",
                     style.width);
}

}  // namespace

int run_verify_faults(const VerifyArgs& args) {
  if (args.quick || !args.ranks.empty() || !args.dtypes.empty() || args.ranks_per_node > 0) {
    throw ArgumentError(
        "--faults runs on 4 ranks of one node and cannot be combined with --quick, --ranks, "
        "--dtype "
        "or --ranks-per-node");
  }
  if (args.device != "cpu") throw ArgumentError("--faults is for --device cpu");
  std::vector<FaultCase> cases = select(args);
  if (cases.empty())
    throw ArgumentError("no fault matches; `crossdock verify --faults --list` shows all names");
  if (args.list) {
    list(cases, args.json);
    return 0;
  }
  const auto wants = [&](const char* communicator) {
    return args.communicators.empty() ||
           std::find(args.communicators.begin(), args.communicators.end(), communicator) !=
               args.communicators.end();
  };
  json results = json::array();
  bool prints = true;
  if (const std::string job = launched_communicator(args.communicators); !job.empty()) {
    Group group(make_job_communicator(job, {}), outer_options());
    if (group.size() <= kCulprit) throw ArgumentError("--faults needs at least 3 processes");
    // A job cannot run further cases after a death.
    if (cases.size() > 1) std::erase_if(cases, kills);
    results = run_cases(group, cases);
    prints = group.rank() == 0;
  } else {
    if (wants("threads")) {
      std::vector<FaultCase> of_threads = cases;
      std::erase_if(of_threads, kills);
      results = run_on_threads(of_threads);
    }
    const bool has_mpi = mpi_is_built() && !find_program("mpirun").empty();
    if (wants("mpi") && (has_mpi || !args.communicators.empty())) {
      for (json& result : run_on_processes("mpi", cases)) results.push_back(std::move(result));
    }
    if (wants("sockets")) {
      for (json& result : run_on_processes("sockets", cases)) results.push_back(std::move(result));
    }
    if (results.empty()) {
      throw ArgumentError("only processes can be killed; choose --communicator sockets or mpi");
    }
  }
  if (prints && args.json) std::cout << results.dump(1) << "\n" << std::flush;
  if (prints && !args.json) std::cout << to_text(results, output_style()) << std::flush;
  const bool passed = std::all_of(results.begin(), results.end(),
                                  [](const json& one) { return one["passed"].get<bool>(); });
  return passed || args.always_zero ? 0 : 1;
}

}  // namespace crossdock::cli
