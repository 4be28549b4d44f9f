// Every fault at every step, on threads and, under mpirun, on MPI processes.

#include "crossdock/testing/faults.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/mpi.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::conformance {
namespace {

constexpr int kRanks = 4;
constexpr std::chrono::seconds kDeadline{3};  // generous: test machines are busy
constexpr std::chrono::seconds kPatience{90};

GroupOptions patient() {
  return {.arrival_deadline = kPatience, .progress_deadline = kPatience};
}

// Stalls take two deadlines each: they happen at every step for the strategies that differ most, in
// the middle of the exchanges for the others. A killed rank needs a separate job (killed_test).
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

// The cases that take another path between nodes; expiring deadlines are the same there.
std::vector<FaultCase> cases_between_nodes() {
  std::vector<FaultCase> all = cases();
  std::erase_if(all, [](const FaultCase& fault) {
    const bool differs = fault.strategy == "direct" || fault.strategy == "hierarchical";
    return !differs || fault.kind == FaultKind::kStalls;
  });
  return all;
}

Group& mpi_group(int ranks_per_node) {
  static std::map<int, std::unique_ptr<Group>> groups;
  std::unique_ptr<Group>& group = groups[ranks_per_node];
  if (!group) {
    group = std::make_unique<Group>(make_mpi_communicator({.ranks_per_node = ranks_per_node}),
                                    patient());
  }
  return *group;
}

void expect_named(const FaultCase& fault, int ranks_per_node) {
  std::mutex mutex;
  std::map<int, FaultOutcome> outcomes;
  const auto run = [&](Group& group) {
    const FaultOutcome outcome = run_fault(group, fault, kDeadline);
    const std::lock_guard lock(mutex);
    outcomes[group.rank()] = outcome;
  };
  if (mpi_is_launched()) {
    run(mpi_group(ranks_per_node));
  } else {
    run_ranks(kRanks, run, {.ranks_per_node = ranks_per_node, .group = patient()});
  }
  for (const auto& [rank, outcome] : outcomes) {
    for (const std::string& finding : outcome.findings) {
      ADD_FAILURE() << "rank " << rank << ": " << finding;
    }
  }
}

class Faults : public testing::TestWithParam<FaultCase> {};

TEST_P(Faults, TheCulpritIsNamedAndTheOthersGoOn) {
  expect_named(GetParam(), 0);
}

class FaultsBetweenNodes : public testing::TestWithParam<FaultCase> {};

TEST_P(FaultsBetweenNodes, TheCulpritIsNamedAndTheOthersGoOn) {
  expect_named(GetParam(), 2);
}

std::string name_of_case(const testing::TestParamInfo<FaultCase>& info) {
  std::string name = info.param.name();
  for (char& c : name) c = c == '/' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, Faults, testing::ValuesIn(cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(All, FaultsBetweenNodes, testing::ValuesIn(cases_between_nodes()),
                         name_of_case);

}  // namespace
}  // namespace crossdock::conformance
