// Strategies on a GPU, several ranks on one: the suite's host tensors are staged through it.

#include "crossdock/cuda.hpp"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <tuple>

#include "conformance/expect_conformance.hpp"

namespace crossdock::conformance {
namespace {

using StrategyAndRanks = std::tuple<std::string, int>;

class CudaRanks : public testing::TestWithParam<StrategyAndRanks> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  }
};

TEST_P(CudaRanks, GiveTheReferencesResults) {
  const auto& [name, num_ranks] = GetParam();
  expect_no_failures(failures_on_threads(
      Ranks{num_ranks}, [&] { return on_cuda(make_strategy(name)); }, list_checks()));
}

TEST_P(CudaRanks, GiveTheBitsOfTheCpu) {
  const auto& [name, num_ranks] = GetParam();
  run_ranks(num_ranks,
            [&](Group& group) {
              const uint64_t hash =
                  output_hash(group, [&] { return on_cuda(make_strategy(name)); });
              if (hash != kKnownOutputHash) throw Error(ErrorCode::kInternal, "another hash");
            },
            {.group = test_deadlines()});
}

INSTANTIATE_TEST_SUITE_P(Conformance, CudaRanks,
                         testing::Combine(testing::ValuesIn(strategy_names()),
                                          testing::Values(1, 2, 4, 7, 8)),
                         [](const testing::TestParamInfo<StrategyAndRanks>& info) {
                           std::ostringstream text;
                           text << std::get<0>(info.param) << "_" << std::get<1>(info.param)
                                << "_ranks";
                           return text.str();
                         });

}  // namespace
}  // namespace crossdock::conformance
