// One rank of a job whose processes end in various ways; mpi_process_test.cpp starts it under
// mpirun. The library initialises and finalises MPI. Rank 1 has the fault.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string_view>
#include <thread>

#include "crossdock/group.hpp"
#include "crossdock/mpi.hpp"

namespace {

using namespace crossdock;  // NOLINT: a program of its own

constexpr int kCulprit = 1;
constexpr std::chrono::seconds kStall{15};  // several deadlines of mpi_process_test.cpp

/// Executes rank 1's fault at call 3. Returns whether main should return.
bool commit_fault(std::string_view fault) {
  if (fault == "kill") raise(SIGKILL);
  if (fault == "exit") std::exit(0);
  if (fault == "throw") throw std::runtime_error("boom");
  if (fault == "stall") std::this_thread::sleep_for(kStall);
  return fault == "return";
}

void report(const Group& group, const Error& error) {
  std::printf("rank %d blames %d at %s %d %s: %s\n", group.rank(), error.context().culprit,
              error.context().operation, static_cast<int>(error.context().sequence),
              error.code() == ErrorCode::kTimeout ? "after a deadline" : "at once", error.what());
  std::fflush(stdout);
}

/// Rank 1 does not take part in making the subgroup.
void make_subgroup_without_culprit(Group& group) {
  if (group.rank() == kCulprit) {
    std::this_thread::sleep_for(kStall);
    return;
  }
  const std::vector<int> everybody = {0, 1, 2};
  try {
    group.subgroup(everybody);
  } catch (const Error& error) {
    std::printf("rank %d: %s\n", group.rank(), error.what());
  }
}

void go_on_with_survivors(Group& group) {
  std::vector<int> survivors;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != kCulprit) survivors.push_back(rank);
  }
  const auto rebuilt = group.subgroup(survivors);
  rebuilt->agree({.operation = "again"});
  std::printf("rank %d goes on\n", group.rank());
}

}  // namespace

int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape): one of the faults
  const std::string_view fault = argc > 1 ? argv[1] : "none";
  const int exit_code = argc > 2 ? std::atoi(argv[2]) : 0;
  Group group(make_mpi_communicator());
  try {
    group.agree({.operation = "plan"});
    group.agree({.operation = "dispatch"});
    if (fault == "absent") {
      make_subgroup_without_culprit(group);
      return exit_code;
    }
    if (group.rank() == kCulprit && commit_fault(fault)) return 0;
    group.agree({.operation = "combine"});
    std::printf("rank %d is done\n", group.rank());
  } catch (const Error& error) {
    report(group, error);
    if (fault == "kill") go_on_with_survivors(group);
  }
  return exit_code;
}
