// Every strategy on ranks that are threads of this process.

#include <gtest/gtest.h>

#include <string>

#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::conformance {
namespace {

void expect_conformance(const StrategyAndRanks& param, const std::vector<Check>& checks) {
  expect_no_failures(failures_on_threads(
      std::get<1>(param), [&] { return make_strategy(std::get<0>(param)); }, checks));
}

class ThreadRanks : public testing::TestWithParam<StrategyAndRanks> {};

TEST_P(ThreadRanks, GiveTheReferencesResults) {
  expect_conformance(GetParam(), list_checks());
}

INSTANTIATE_TEST_SUITE_P(Conformance, ThreadRanks,
                         testing::Combine(testing::ValuesIn(strategy_names()),
                                          testing::Values(Ranks{1}, Ranks{2}, Ranks{4}, Ranks{7},
                                                          Ranks{8})),
                         name_of_case);

class ThreadRanksOnNodes : public testing::TestWithParam<StrategyAndRanks> {};

TEST_P(ThreadRanksOnNodes, GiveTheReferencesResults) {
  expect_conformance(GetParam(), quick_checks());
}

// One rank per node, equal nodes, a smaller last node.
INSTANTIATE_TEST_SUITE_P(Conformance, ThreadRanksOnNodes,
                         testing::Combine(testing::ValuesIn(strategy_names()),
                                          testing::Values(Ranks{4, 1}, Ranks{4, 2}, Ranks{7, 3},
                                                          Ranks{8, 4})),
                         name_of_case);

TEST(SameBits, OnOneFourAndSevenThreadRanks) {
  EXPECT_EQ(expected_output_hash(), kKnownOutputHash);
  for (const std::string& name : strategy_names()) {
    for (const int num_ranks : {1, 4, 7}) {
      SCOPED_TRACE(name);
      expect_known_bits({num_ranks}, [&] { return make_strategy(name); });
    }
  }
}

}  // namespace
}  // namespace crossdock::conformance
