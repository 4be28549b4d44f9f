#include "crossdock/testing/faults.hpp"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/commands.hpp"
#include "cli/machine.hpp"
#include "cli/mpi_launch.hpp"
#include "cli/progress_line.hpp"
#include "cli/verify/run.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {
namespace {

using conformance::FaultCase;
using conformance::FaultKind;
using conformance::FaultOutcome;
using nlohmann::json;

constexpr int kRanks = 4;
constexpr int kCulprit = 2;
constexpr std::chrono::seconds kDeadline{2};    // of the group with the fault
constexpr std::chrono::seconds kPatience{120};  // of the group around it
constexpr std::chrono::seconds kLimitOfRanks{1200};

GroupOptions patient() {
  return {.arrival_deadline = kPatience, .progress_deadline = kPatience};
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
    const auto is_meant = [&](const std::string& part) {
      return names.contains(part) ? fault.name() == part : fits(fault.name(), part);
    };
    return !args.cases.empty() && std::none_of(args.cases.begin(), args.cases.end(), is_meant);
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

// Those who can still say how a case ended.
std::unique_ptr<Group> survivors_of(Group& group, const FaultCase& fault) {
  std::vector<int> members;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != fault.culprit) members.push_back(rank);
  }
  return group.subgroup(members);
}

// How a case ended on all ranks together; whole on rank 0.
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
            {.ranks_per_node = 0, .group = patient()});
  return results;
}

// One job runs all cases in which nobody dies; each of the others is a job of its own.
json run_on_processes(const std::vector<FaultCase>& cases) {
  const std::vector<std::string> head = {"verify", "--faults", "--json", "--always-zero"};
  std::vector<std::string> arguments = head;
  for (const FaultCase& fault : cases) {
    if (!kills(fault)) arguments.insert(arguments.end(), {"--case", fault.name()});
  }
  json results = json::array();
  if (arguments != head) results = json::parse(run_under_mpi(kRanks, arguments, kLimitOfRanks));
  const ProgressLine line;
  for (const FaultCase& fault : cases) {
    if (!kills(fault)) continue;
    line.show(fault.name());
    arguments = head;
    arguments.insert(arguments.end(), {"--case", fault.name()});
    const std::string output = run_under_mpi_with_a_death(kRanks, arguments, kLimitOfRanks);
    const json ends = json::parse(output, nullptr, /*allow_exceptions=*/false);
    if (ends.is_array() && ends.size() == 1) {
      results.push_back(ends[0]);
    } else {
      results.push_back({{"case", fault.name()},
                         {"communicator", "mpi"},
                         {"ranks", kRanks},
                         {"passed", false},
                         {"latency_ms", 0.0},
                         {"message", ""},
                         {"findings", {"the survivors did not come to an end"}}});
    }
  }
  return results;
}

void print_table(const json& results) {
  std::printf("%-46s %-8s %-7s %9s\n", "fault", "engine", "result", "latency");
  for (const json& result : results) {
    std::printf("%-46s %-8s %-7s %6.1f ms\n", result["case"].get<std::string>().c_str(),
                result["communicator"].get<std::string>().c_str(),
                result["passed"].get<bool>() ? "named" : "FAILED",
                result["latency_ms"].get<double>());
    for (const auto& finding : result["findings"]) {
      std::printf("    %s\n", finding.get<std::string>().c_str());
    }
  }
  const auto num_passed = std::count_if(results.begin(), results.end(),
                                        [](const json& one) { return one["passed"].get<bool>(); });
  std::printf(
      "%td of %zu faults: every survivor named rank %d and the call, and went on without "
      "it\n",
      num_passed, results.size(), kCulprit);
}

}  // namespace

int run_verify_faults(const VerifyArgs& args) {
  if (args.quick || !args.ranks.empty() || !args.dtypes.empty() || args.ranks_per_node > 0) {
    throw ArgumentError(
        "--faults runs on 4 ranks of one node; --quick, --ranks, --dtype and --ranks-per-node do "
        "not go with it");
  }
  std::vector<FaultCase> cases = select(args);
  if (cases.empty())
    throw ArgumentError("no fault fits; `crossdock verify --faults --list` names all");
  if (args.list) {
    list(cases, args.json);
    return 0;
  }
  const auto wants = [&](const char* engine) {
    return args.communicators.empty() ||
           std::find(args.communicators.begin(), args.communicators.end(), engine) !=
               args.communicators.end();
  };
  json results = json::array();
  bool prints = true;
  if (mpi_is_launched()) {
    Group group(make_mpi_communicator(), patient());
    if (group.size() <= kCulprit) throw ArgumentError("--faults needs at least 3 processes");
    // After a death the job cannot run further cases.
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
      for (json& result : run_on_processes(cases)) results.push_back(std::move(result));
    }
    if (results.empty()) throw ArgumentError("only MPI processes can be killed");
  }
  if (prints && args.json) std::cout << results.dump(1) << "\n" << std::flush;
  if (prints && !args.json) print_table(results);
  const bool passed = std::all_of(results.begin(), results.end(),
                                  [](const json& one) { return one["passed"].get<bool>(); });
  return passed || args.always_zero ? 0 : 1;
}

}  // namespace crossdock::cli
