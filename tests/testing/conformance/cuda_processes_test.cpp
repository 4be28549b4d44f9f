// Processes that reach each other's GPU memory. If they share a GPU, their kernels take turns, so a
// wait of one for the other takes milliseconds; therefore only a part of the suite, for
// correctness. Compiled for each communicator of processes.

#include <gtest/gtest.h>

#include "comm/attachment.hpp"
#include "support/process_communicator.hpp"
#include "testing/conformance/expect_conformance.hpp"
#include "testing/conformance/on_gpu.hpp"

namespace crossdock::conformance {
namespace {

// Some routings in one dtype, and steps that overlap.
std::vector<Check> some_checks() {
  std::vector<Check> checks = list_checks();
  std::erase_if(checks, [](const Check& check) {
    const auto has = [&](const char* part) { return check.name.find(part) != std::string::npos; };
    return !has("/bf16/plain") && !has("/bf16/alignment") && !has("plans_in_flight") &&
           !has("growth_on_one_rank") && !has("repeated_id");
  });
  return checks;
}

class CudaProcesses : public CudaTest, public ::testing::WithParamInterface<std::string> {
 protected:
  static std::unique_ptr<Strategy> strategy() { return strategy_on_gpu(GetParam()); }
};

TEST_P(CudaProcesses, GiveTheReferencesResults) {
  Group group(crossdock::testing::make_process_communicator(), test_deadlines());
  const std::vector<Check> checks = some_checks();
  const Report report = run_checks(group, strategy, checks);
  EXPECT_EQ(report.num_checks, std::ssize(checks));
  expect_no_failures(report.failures);
}

TEST_P(CudaProcesses, GiveTheBitsOfTheCpu) {
  Group group(crossdock::testing::make_process_communicator(), test_deadlines());
  EXPECT_EQ(output_hash(group, strategy), kKnownOutputHash);
}

/// On GPUs that do not reach each other's memory: rows go through host memory.
using CudaProcessesOutOfReach = CudaProcesses;

TEST_P(CudaProcessesOutOfReach, GiveTheReferencesResults) {
  Group group(crossdock::testing::make_process_communicator(), test_deadlines());
  comm::gpu_pretences_of(group).reaches_nobody = true;
  expect_no_failures(run_checks(group, strategy, some_checks()).failures);
}

TEST_P(CudaProcessesOutOfReach, GiveTheBitsOfTheCpu) {
  Group group(crossdock::testing::make_process_communicator(), test_deadlines());
  comm::gpu_pretences_of(group).reaches_nobody = true;
  EXPECT_EQ(output_hash(group, strategy), kKnownOutputHash);
}

INSTANTIATE_TEST_SUITE_P(Conformance, CudaProcessesOutOfReach,
                         ::testing::Values("direct", "alltoall"),
                         [](const auto& info) { return info.param; });

INSTANTIATE_TEST_SUITE_P(Conformance, CudaProcesses, ::testing::Values("direct", "alltoall"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace crossdock::conformance
