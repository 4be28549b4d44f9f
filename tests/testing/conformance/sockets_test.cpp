// Every strategy on ranks that are processes of communicator sockets, which the test forks.

#include <gtest/gtest.h>

#include <string>

#include "comm/group_runner.hpp"
#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::conformance {
namespace {

// Quick checks on simulated nodes (ranks_per_node of the runner); all checks on one node.
#ifdef CROSSDOCK_TEST_RANKS_PER_NODE
std::vector<Check> checks_to_run() {
  return quick_checks();
}
std::vector<int> sizes() {
  return {4, 7};
}
#else
std::vector<Check> checks_to_run() {
  return list_checks();
}
std::vector<int> sizes() {
  return crossdock::testing::group_sizes();
}
#endif

class SocketsRanks : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(SocketsRanks, GiveTheReferencesResultsAndTheKnownBits) {
  const auto& [name, size] = GetParam();
  const std::vector<Check> checks = checks_to_run();
  const auto outcomes = crossdock::testing::run_group(
      size,
      [&, name = name](Group& group) {
        const Report report = run_checks(
            group, [&] { return make_strategy(name); }, checks);
        EXPECT_EQ(report.num_checks, std::ssize(checks));
        expect_no_failures(report.failures);
        EXPECT_EQ(output_hash(group, [&] { return make_strategy(name); }), kKnownOutputHash);
      },
      test_deadlines());
  for (const auto& outcome : outcomes) EXPECT_FALSE(outcome.threw) << outcome.message;
}

INSTANTIATE_TEST_SUITE_P(Conformance, SocketsRanks,
                         ::testing::Combine(::testing::ValuesIn(strategy_names()),
                                            ::testing::ValuesIn(sizes())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" +
                                  std::to_string(std::get<1>(info.param)) + "_ranks";
                         });

}  // namespace
}  // namespace crossdock::conformance
