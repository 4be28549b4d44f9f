// Bits and special values of partial sums.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "crossdock/crossdock.hpp"
#include "dispatch/sums_case.hpp"

namespace crossdock {
namespace {

using reference::PerRank;
using reference::to_tensor;
using reference::to_values;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Combine and dispatch_backward of the rows.
Sums run(const SumsCase& given, const std::string& strategy, const ThreadOptions& options) {
  Sums sums{PerRank(given.ranks.size()), PerRank(given.ranks.size())};
  run_ranks(
      static_cast<int>(given.ranks.size()),
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        Dispatcher dispatcher(group, given.config, strategy);
        const RankTensors tensors = tensors_of(given.config, given.ranks[r], given.dtype);
        const Plan plan = dispatcher.plan(tensors.routing());
        const OwnedTensor y =
            to_tensor(given.dtype, {plan.num_rows(), given.config.width}, given.rows[r]);
        sums.out[r] = to_values(dispatcher.combine(plan, y.view));
        sums.grad_x[r] = to_values(dispatcher.dispatch_backward(plan, y.view));
      },
      options);
  return sums;
}

struct Setting {
  std::string strategy;
  Nodes nodes;
};

class PartialSumsOf : public testing::TestWithParam<Setting> {};

TEST_P(PartialSumsOf, EveryDtypeHaveTheBitsOfTheReference) {
  const auto& [strategy, nodes] = GetParam();
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (const PartialSums mode : {PartialSums::kF32, PartialSums::kRowType}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::string(name_of(mode)));
      const SumsCase given = random_sums(nodes.num_ranks, dtype, mode);
      const Sums wanted = wanted_sums(given, strategy, nodes);
      ThreadOptions options = options_for(nodes);
      for (const int64_t staging_bytes : {options.group.staging_bytes, int64_t{4096}}) {
        options.group.staging_bytes = staging_bytes;
        const Sums got = run(given, strategy, options);
        expect_same_bits(got.out, wanted.out);
        expect_same_bits(got.grad_x, wanted.grad_x);
      }
    }
  }
}

std::vector<Setting> all_settings() {
  std::vector<Setting> settings;
  for (const std::string& strategy : strategy_names()) {
    for (const Nodes& nodes :
         {Nodes{1, 0}, Nodes{4, 0}, Nodes{4, 2}, Nodes{4, 1}, Nodes{7, 3}, Nodes{8, 4}}) {
      settings.push_back({strategy, nodes});
    }
  }
  return settings;
}

INSTANTIATE_TEST_SUITE_P(AllNodes, PartialSumsOf, testing::ValuesIn(all_settings()),
                         [](const testing::TestParamInfo<Setting>& info) {
                           return info.param.strategy + "_" +
                                  std::to_string(info.param.nodes.num_ranks) + "_by_" +
                                  std::to_string(info.param.nodes.ranks_per_node);
                         });

TEST(PartialSums, InTheTypeOfFp32AndFp64RowsAreThoseInFp32) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const SumsCase in_fp32 = random_sums(4, dtype, PartialSums::kF32);
    const SumsCase in_rows = random_sums(4, dtype, PartialSums::kRowType);
    for (const std::string& strategy : strategy_names()) {
      const Sums wanted = run(in_fp32, strategy, options_for({4, 2}));
      const Sums got = run(in_rows, strategy, options_for({4, 2}));
      expect_same_bits(got.out, wanted.out);
      expect_same_bits(got.grad_x, wanted.grad_x);
    }
  }
}

// Otherwise the tests above would prove nothing.
TEST(PartialSums, InBf16DifferFromThoseInFp32AndFromExactSums) {
  const auto out = [](PartialSums mode) {
    return run(random_sums(4, DType::kBF16, mode), "hierarchical", options_for({4, 2})).out;
  };
  const PerRank in_rows = out(PartialSums::kRowType);
  for (const PartialSums other : {PartialSums::kNone, PartialSums::kF32}) {
    EXPECT_GT(reference::compare(in_rows[0], out(other)[0]).num_different, 10);
  }
}

TEST(PartialSums, OfOneRankHaveTheBitsOfExactSums) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const std::string& strategy : strategy_names()) {
      const Sums exact =
          run(random_sums(1, dtype, PartialSums::kNone), strategy, options_for({1, 0}));
      const Sums partial =
          run(random_sums(1, dtype, PartialSums::kRowType), strategy, options_for({1, 0}));
      expect_same_bits(partial.out, exact.out);
      expect_same_bits(partial.grad_x, exact.grad_x);
    }
  }
}

// One token of rank 0, with routes to all four ranks; column d of rank r's row is columns[d][r].
std::vector<double> sum_of_columns(const std::vector<std::vector<double>>& columns,
                                   const std::string& strategy, DType dtype, PartialSums mode) {
  const auto D = std::ssize(columns);
  SumsCase given{.config = {.num_experts = 4, .top_k = 4, .width = D, .partial_sums = mode},
                 .ranks = std::vector<reference::RankInput>(4),
                 .dtype = dtype,
                 .layout = {},
                 .rows = PerRank(4)};
  for (size_t r = 0; r < 4; ++r) {
    if (r == 0) {
      given.ranks[r] = {.T = 1,
                        .x = std::vector<double>(columns.size()),
                        .expert_ids = {0, 1, 2, 3},
                        .weights = {1, 1, 1, 0},
                        .grad_out = std::vector<double>(columns.size()),
                        .mask = {0}};
    }
    for (const auto& column : columns) given.rows[r].push_back(column[r]);
  }
  return run(given, strategy, options_for({4, 2})).out[0];
}

TEST(PartialSums, PassOnWhatIsNotFiniteAsExactSums) {
  const std::vector<std::vector<double>> columns = {{1, kNan, 1, 1},
                                                    {1, kInf, 2, 3},
                                                    {-kInf, 1, 2, 3},
                                                    {kInf, 1, -kInf, 1},
                                                    {kInf, -kInf, 1, 1},
                                                    {1, 2, kInf, 1},
                                                    {1, 2, 3, kInf} /* times 0 */,
                                                    {1, 2, 3, kNan}};
  for (const std::string& strategy : strategy_names()) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const auto exact = sum_of_columns(columns, strategy, dtype, PartialSums::kNone);
      for (const PartialSums mode : {PartialSums::kF32, PartialSums::kRowType}) {
        const auto partial = sum_of_columns(columns, strategy, dtype, mode);
        EXPECT_EQ(reference::compare(partial, exact).num_different, 0)
            << strategy << " " << name_of(dtype) << " " << name_of(mode);
      }
    }
  }
}

// 40000 + 40000 on ranks 0 and 1, which are one node, and -40000 on rank 2.
TEST(PartialSums, BeyondTheRangeOfTheirTypeAreInfinite) {
  const std::vector<std::vector<double>> columns = {{40000, 40000, -40000, 0}};
  const auto sum = [&](const char* strategy, DType dtype, PartialSums mode) {
    return sum_of_columns(columns, strategy, dtype, mode)[0];
  };
  EXPECT_EQ(sum("hierarchical", DType::kF16, PartialSums::kF32), 40000);
  EXPECT_EQ(sum("hierarchical", DType::kF16, PartialSums::kRowType), kInf);
  EXPECT_EQ(sum("direct", DType::kF16, PartialSums::kRowType), 40000);  // each rank has its own
  EXPECT_TRUE(std::isfinite(sum("hierarchical", DType::kBF16, PartialSums::kRowType)));
}

}  // namespace
}  // namespace crossdock
