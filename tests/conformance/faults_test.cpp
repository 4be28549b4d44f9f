// Every fault at every step, on threads and, under mpirun, on MPI processes.

#include "crossdock/faults.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "crossdock/mpi.hpp"
#include "crossdock/strategy.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::conformance {
namespace {

constexpr int kRanks = 4;
constexpr std::chrono::seconds kDeadline{3};  // generous: machines that test are loaded
constexpr std::chrono::seconds kPatience{90};

GroupOptions patient() {
  return {.arrival_deadline = kPatience, .progress_deadline = kPatience};
}

// Stalls take two deadlines each: at every step for the strategies that differ most, in the middle
// of the exchanges for the others. A killed rank needs a job of its own (killed_test).
std::vector<FaultCase> cases() {
  std::vector<FaultCase> all;
  for (const FaultCase& fault : list_faults(strategy_names(), 2)) {
    if (fault.kind == FaultKind::kKilled) continue;
    const bool is_quick = fault.kind != FaultKind::kStalls;
    const bool differs = fault.strategy == "alltoall" || fault.strategy == "direct";
    const bool is_exchange =
        fault.step == FaultStep::kMidDispatch || fault.step == FaultStep::kMidCombine;
    if (is_quick || differs || is_exchange) all.push_back(fault);
  }
  return all;
}

class Faults : public testing::TestWithParam<FaultCase> {};

TEST_P(Faults, TheCulpritIsNamedAndTheOthersGoOn) {
  const FaultCase& fault = GetParam();
  std::mutex mutex;
  std::map<int, FaultOutcome> outcomes;
  const auto run = [&](Group& group) {
    const FaultOutcome outcome = run_fault(group, fault, kDeadline);
    const std::lock_guard lock(mutex);
    outcomes[group.rank()] = outcome;
  };
  if (mpi_is_launched()) {
    static Group group(make_mpi_communicator(), patient());
    run(group);
  } else {
    run_ranks(kRanks, run, {.ranks_per_node = 0, .group = patient()});
  }
  for (const auto& [rank, outcome] : outcomes) {
    for (const std::string& finding : outcome.findings) {
      ADD_FAILURE() << "rank " << rank << ": " << finding;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Faults, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<FaultCase>& info) {
                           std::string name = info.param.name();
                           for (char& c : name) c = c == '/' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace crossdock::conformance
