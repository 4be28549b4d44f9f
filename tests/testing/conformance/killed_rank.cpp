// A job of MPI processes in which one is killed: killed_rank STRATEGY STEP. Survivors that end
// correctly print a line.

#include <cstdlib>
#include <iostream>
#include <string>

#include "crossdock/mpi.hpp"
#include "crossdock/testing/faults.hpp"

int main(int argc, char** argv) {
  using namespace crossdock;
  if (argc != 3) return 2;
  const std::chrono::seconds patience(120);
  Group group(make_mpi_communicator(),
              {.arrival_deadline = patience, .progress_deadline = patience});
  const conformance::FaultCase fault{
      .strategy = argv[1],
      .kind = conformance::FaultKind::kKilled,
      .step = static_cast<conformance::FaultStep>(std::atoi(argv[2])),
      .culprit = 2};
  const conformance::FaultOutcome outcome =
      conformance::run_fault(group, fault, std::chrono::seconds(10));
  std::string line = "survivor " + std::to_string(group.rank());
  for (const std::string& finding : outcome.findings) line += ": " + finding;
  std::cout << line + "\n" << std::flush;
  return 0;
}
