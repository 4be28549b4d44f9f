// Strategies on a GPU, several ranks on one: the suite's host tensors are staged through it. Ranks
// that play those of several nodes pack and exchange what crosses between nodes, and write and read
// rows where they lie inside one.

#include "crossdock/cuda.hpp"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <tuple>

#include "conformance/expect_conformance.hpp"

namespace crossdock::conformance {
namespace {

using StrategyAndRanks = std::tuple<std::string, Ranks>;

class CudaRanks : public testing::TestWithParam<StrategyAndRanks> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  }
};

TEST_P(CudaRanks, GiveTheReferencesResults) {
  const auto& [name, ranks] = GetParam();
  expect_no_failures(failures_on_threads(
      ranks, [&] { return on_cuda(make_strategy(name)); }, list_checks()));
}

TEST_P(CudaRanks, GiveTheBitsOfTheCpu) {
  const auto& [name, ranks] = GetParam();
  run_ranks(ranks.size,
            [&](Group& group) {
              const uint64_t hash =
                  output_hash(group, [&] { return on_cuda(make_strategy(name)); });
              if (hash != kKnownOutputHash) throw Error(ErrorCode::kInternal, "another hash");
            },
            {.ranks_per_node = ranks.per_node, .group = test_deadlines()});
}

std::string name_of_case(const testing::TestParamInfo<StrategyAndRanks>& info) {
  const auto& [name, ranks] = info.param;
  std::ostringstream text;
  text << name << "_" << ranks.size << "_ranks";
  if (ranks.per_node > 0) text << "_" << ranks.per_node << "_per_node";
  return text.str();
}

INSTANTIATE_TEST_SUITE_P(Conformance, CudaRanks,
                         testing::Combine(testing::ValuesIn(strategy_names()),
                                          testing::Values(Ranks{1}, Ranks{2}, Ranks{4}, Ranks{7},
                                                          Ranks{8}, Ranks{4, 1}, Ranks{4, 2},
                                                          Ranks{7, 3}, Ranks{8, 4})),
                         name_of_case);

}  // namespace
}  // namespace crossdock::conformance
