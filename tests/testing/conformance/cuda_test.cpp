// Strategies on GPUs, with several ranks per GPU if there are more ranks than GPUs: the suite's
// tensors are copied there and back. Ranks on simulated nodes pack and exchange rows between
// nodes, and write and read rows in place inside a node.

#include <gtest/gtest.h>

#include <string>

#include "comm/attachment.hpp"
#include "testing/conformance/expect_conformance.hpp"
#include "testing/conformance/on_gpu.hpp"

namespace crossdock::conformance {
namespace {

class CudaRanks : public CudaTest, public testing::WithParamInterface<StrategyAndRanks> {
 protected:
  static Ranks ranks() { return std::get<1>(GetParam()); }
  static std::unique_ptr<Strategy> strategy() { return strategy_on_gpu(std::get<0>(GetParam())); }
};

TEST_P(CudaRanks, GiveTheReferencesResults) {
  expect_no_failures(failures_on_threads(ranks(), strategy, list_checks()));
}

TEST_P(CudaRanks, GiveTheBitsOfTheCpu) {
  expect_known_bits(ranks(), strategy);
}

INSTANTIATE_TEST_SUITE_P(Conformance, CudaRanks,
                         testing::Combine(testing::ValuesIn(strategy_names()),
                                          testing::Values(Ranks{1}, Ranks{2}, Ranks{4}, Ranks{7},
                                                          Ranks{8}, Ranks{4, 1}, Ranks{4, 2},
                                                          Ranks{7, 3}, Ranks{8, 4})),
                         name_of_case);

/// GPUs that do not reach each other's memory: rows go through host memory.
class CudaRanksOutOfReach : public CudaRanks {
 protected:
  static void pretend(Group& group) { comm::gpu_pretences_of(group).reaches_nobody = true; }
};

TEST_P(CudaRanksOutOfReach, GiveTheReferencesResults) {
  expect_no_failures(failures_on_threads(ranks(), strategy, list_checks(), pretend));
}

TEST_P(CudaRanksOutOfReach, GiveTheBitsOfTheCpu) {
  expect_known_bits(ranks(), strategy, pretend);
}

INSTANTIATE_TEST_SUITE_P(Conformance, CudaRanksOutOfReach,
                         testing::Combine(testing::ValuesIn(strategy_names()),
                                          testing::Values(Ranks{2}, Ranks{4}, Ranks{7},
                                                          Ranks{4, 2})),
                         name_of_case);

// Ranks that appear to be on different GPUs send one copy of a token per rank.
class CudaRanksApart : public CudaRanks {
 protected:
  static void pretend(Group& group) { comm::gpu_pretences_of(group).peers_are_elsewhere = true; }
};

TEST_P(CudaRanksApart, GiveTheReferencesResults) {
  expect_no_failures(failures_on_threads(ranks(), strategy, list_checks(), pretend));
}

TEST_P(CudaRanksApart, GiveTheBitsOfTheCpu) {
  expect_known_bits(ranks(), strategy, pretend);
}

INSTANTIATE_TEST_SUITE_P(Conformance, CudaRanksApart,
                         testing::Combine(testing::Values("direct"),
                                          testing::Values(Ranks{2}, Ranks{4}, Ranks{7})),
                         name_of_case);

}  // namespace
}  // namespace crossdock::conformance
