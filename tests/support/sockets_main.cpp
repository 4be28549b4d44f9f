// main() of GoogleTest programs whose ranks are processes of communicator sockets. The program has
// one argument, the number of processes, and starts itself that many times. Every process runs
// every test; rank 0 prints as usual, the others only their failures. The program fails if any
// process fails or has not ended at the deadline.
//
// As under MPI, a test must use EXPECT, not ASSERT, before collective calls.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "support/failure_printer.hpp"
#include "support/process_communicator.hpp"
#include "support/rank_processes.hpp"

namespace {

using crossdock::testing::RankProcesses;

constexpr std::chrono::seconds kJobDeadline{600};

bool has_succeeded(int rank, const std::optional<int>& status) {
  if (!status) return false;
  if (WIFSIGNALED(*status)) {
    std::fprintf(stderr, "rank %d died of signal %d\n", rank, WTERMSIG(*status));
  }
  return WIFEXITED(*status) && WEXITSTATUS(*status) == 0;
}

int run_job(int size, const std::vector<std::string>& arguments) {
  const auto deadline = std::chrono::steady_clock::now() + kJobDeadline;
  const RankProcesses processes(size, arguments);
  bool is_good = true;
  for (int rank = 0; rank < size; ++rank) {
    is_good = has_succeeded(rank, processes.wait_for(rank, deadline)) && is_good;
  }
  if (!is_good) std::fprintf(stderr, "some rank has failed\n");
  return is_good ? EXIT_SUCCESS : EXIT_FAILURE;
}

// No process ends while another may still use its memory.
int run_rank() {
  crossdock::Group all(crossdock::testing::make_process_communicator(),
                       {.arrival_deadline = kJobDeadline, .progress_deadline = kJobDeadline});
  crossdock::testing::print_as_rank(all.rank());
  const int failed = RUN_ALL_TESTS();
  all.agree({.operation = "end"});
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  ::testing::InitGoogleTest(&argc, argv);
  try {
    if (arguments.back() == crossdock::testing::kAsRank) return run_rank();
    const int size = argc == 2 ? std::atoi(argv[1]) : 0;
    if (size > 0) return run_job(size, arguments);
    std::fprintf(stderr, "usage: %s NUMBER_OF_PROCESSES\n", argv[0]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return EXIT_FAILURE;
}
