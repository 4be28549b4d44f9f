// Every strategy on MPI processes; one mpirun runs all checks.

#include "crossdock/mpi.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <memory>

#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::conformance {
namespace {

std::unique_ptr<Group> world_group;

class MpiRanks : public testing::TestWithParam<std::string> {};

TEST_P(MpiRanks, GiveTheReferencesResults) {
  const std::vector<Check> checks = list_checks();
  const Report report = run_checks(
      *world_group, [] { return make_strategy(GetParam()); }, checks);
  EXPECT_EQ(report.num_checks, std::ssize(checks));
  expect_no_failures(report.failures);
}

TEST_P(MpiRanks, GiveTheKnownBits) {
  EXPECT_EQ(output_hash(*world_group, [] { return make_strategy(GetParam()); }), kKnownOutputHash);
}

INSTANTIATE_TEST_SUITE_P(Conformance, MpiRanks, testing::ValuesIn(strategy_names()),
                         [](const auto& info) { return info.param; });

// All ranks but the first print only failures.
class QuietPrinter : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) std::fprintf(stderr, "%s\n", result.message());
  }
};

}  // namespace
}  // namespace crossdock::conformance

int main(int argc, char** argv) {
  using namespace crossdock;
  testing::InitGoogleTest(&argc, argv);
  conformance::world_group =
      std::make_unique<Group>(make_mpi_communicator(), conformance::test_deadlines());
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (conformance::world_group->rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new conformance::QuietPrinter);
  }
  const int status = RUN_ALL_TESTS();
  conformance::world_group.reset();
  return status;
}
