#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "crossdock/crossdock.hpp"

namespace crossdock {
namespace {

constexpr int64_t kExperts = 12;
constexpr int64_t kTopK = 5;
constexpr int64_t kWidth = 9;

// Tokens and routes of one rank, the same for every strategy and topology.
struct RankInput {
  int64_t T = 0;
  std::vector<float> x;        // [T, D] unique values
  std::vector<int32_t> ids;    // [T, K]
  std::vector<float> weights;  // [T, K]
};

RankInput make_input(int rank) {
  RankInput input;
  input.T = rank == 2 ? 0 : 5 + 3 * rank;
  std::mt19937 random(static_cast<uint32_t>(100 + rank));
  for (int64_t t = 0; t < input.T; ++t) {
    for (int64_t d = 0; d < kWidth; ++d) {
      input.x.push_back(static_cast<float>(rank * 1000 + t) + static_cast<float>(d) / 16.0f);
    }
    std::vector<int32_t> ids;
    for (int32_t e = 0; e < kExperts; ++e) ids.push_back(e);
    std::shuffle(ids.begin(), ids.end(), random);
    for (int64_t k = 0; k < kTopK; ++k) {
      input.ids.push_back(random() % 7 == 0 ? -1 : ids[static_cast<size_t>(k)]);
      input.weights.push_back(static_cast<float>(random() % 1000) / 999.0f);
    }
  }
  return input;
}

struct RankOutput {
  std::vector<float> rows;
  std::vector<float> out;
  std::vector<float> grad_x;
};

std::vector<float> to_vector(const OwnedTensor& tensor) {
  const auto values = tensor.view.as<float>();
  return {values.begin(), values.end()};
}

// Dispatch, scale every row by its expert, combine, and both backwards. `own_memory`: rows and y
// are in the caller's memory, not the library's.
std::vector<RankOutput> run(const std::string& strategy, int size, int ranks_per_node,
                            PartialSums partial_sums, bool own_memory = false,
                            int64_t staging_bytes = GroupOptions().staging_bytes) {
  std::vector<RankOutput> outputs(static_cast<size_t>(size));
  run_ranks(
      size,
      [&](Group& group) {
        const RankInput input = make_input(group.rank());
        Dispatcher dispatcher(group,
                              {.num_experts = kExperts,
                               .top_k = kTopK,
                               .width = kWidth,
                               .alignment = 8,
                               .capacity = {},
                               .placement = {},
                               .partial_sums = partial_sums},
                              strategy);
        const Plan plan = dispatcher.plan(
            Routing{.expert_ids = ConstTensorView(input.ids.data(), {input.T, kTopK}),
                    .weights = ConstTensorView(input.weights.data(), {input.T, kTopK}),
                    .mask = {}});
        std::vector<float> own_rows(static_cast<size_t>(plan.num_rows() * kWidth), -1.0f);
        DispatchArgs args;
        args.x = ConstTensorView(input.x.data(), {input.T, kWidth});
        if (own_memory) args.rows = TensorView(own_rows.data(), {plan.num_rows(), kWidth});
        const DispatchResult rows = dispatcher.dispatch(plan, args);

        std::vector<float> own_y(own_rows.size());
        OwnedTensor y = own_memory
                            ? OwnedTensor{TensorView(own_y.data(), {plan.num_rows(), kWidth}), {}}
                            : dispatcher.allocate_rows(plan, DType::kF32);
        const Segments segments = plan.segments();
        for (int64_t e = 0; e < segments.num_segments; ++e) {
          const int64_t expert = first_expert(kExperts, group.size(), group.rank()) + e;
          for (int64_t i = segments.starts[e] * kWidth; i < segments.starts[e + 1] * kWidth; ++i) {
            y.view.as<float>()[static_cast<size_t>(i)] =
                rows.rows.view.as<float>()[static_cast<size_t>(i)] *
                (1.0f + static_cast<float>(expert) / 7.0f);
          }
        }
        RankOutput& output = outputs[static_cast<size_t>(group.rank())];
        output.rows = to_vector(rows.rows);
        output.out = to_vector(dispatcher.combine(plan, y.view));
        output.grad_x = to_vector(dispatcher.dispatch_backward(plan, y.view));
      },
      {.ranks_per_node = ranks_per_node,
       .group = {.arrival_deadline = std::chrono::seconds(20),
                 .progress_deadline = std::chrono::seconds(20),
                 .staging_bytes = staging_bytes}});
  return outputs;
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(a.empty() ? 0 : std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

struct NodesCase {
  std::string strategy;
  int size;
  int ranks_per_node;
};

class Nodes : public testing::TestWithParam<NodesCase> {};

TEST_P(Nodes, ExactModeGivesTheBitsOfAlltoallInAnyTopology) {
  const auto& [strategy, size, ranks_per_node] = GetParam();
  const auto expected = run("alltoall", size, 0, PartialSums::kNone);
  for (const bool own_memory : {false, true}) {
    const auto actual = run(strategy, size, ranks_per_node, PartialSums::kNone, own_memory);
    for (size_t r = 0; r < expected.size(); ++r) {
      expect_same_bits(actual[r].rows, expected[r].rows);
      expect_same_bits(actual[r].out, expected[r].out);
      expect_same_bits(actual[r].grad_x, expected[r].grad_x);
    }
  }
}

TEST_P(Nodes, PartialSumsAreCloseToTheExactOnesAndTheSameEveryTime) {
  const auto& [strategy, size, ranks_per_node] = GetParam();
  const auto exact = run("alltoall", size, 0, PartialSums::kNone);
  const auto first = run(strategy, size, ranks_per_node, PartialSums::kF32);
  const auto second = run(strategy, size, ranks_per_node, PartialSums::kF32);
  for (size_t r = 0; r < exact.size(); ++r) {
    expect_same_bits(first[r].out, second[r].out);
    ASSERT_EQ(first[r].out.size(), exact[r].out.size());
    for (size_t i = 0; i < exact[r].out.size(); ++i) {
      ASSERT_NEAR(first[r].out[i], exact[r].out[i], 1e-5 * std::abs(exact[r].out[i]) + 1e-5);
      ASSERT_NEAR(first[r].grad_x[i], exact[r].grad_x[i],
                  1e-5 * std::abs(exact[r].grad_x[i]) + 1e-5);
    }
  }
}

TEST_P(Nodes, RoundsOfAFewTokensGiveTheBitsOfOneRound) {
  const auto& [strategy, size, ranks_per_node] = GetParam();
  constexpr int64_t kThreeTokens = 3 * kTopK * kWidth * int64_t{sizeof(float)};
  for (const PartialSums partial_sums : {PartialSums::kNone, PartialSums::kF32}) {
    const auto expected = run(strategy, size, ranks_per_node, partial_sums);
    const auto actual =
        run(strategy, size, ranks_per_node, partial_sums, /*own_memory=*/false, kThreeTokens);
    for (size_t r = 0; r < expected.size(); ++r) {
      expect_same_bits(actual[r].rows, expected[r].rows);
      expect_same_bits(actual[r].out, expected[r].out);
      expect_same_bits(actual[r].grad_x, expected[r].grad_x);
    }
  }
}

TEST_P(Nodes, PartialSumsPerRankHaveTheBitsOfAlltoallPartialSums) {
  const auto& [strategy, size, ranks_per_node] = GetParam();
  if (strategy != "direct") GTEST_SKIP() << "sums per node have bits of their own";
  const auto expected = run("alltoall", size, 0, PartialSums::kF32);
  const auto actual = run(strategy, size, ranks_per_node, PartialSums::kF32);
  for (size_t r = 0; r < expected.size(); ++r) {
    expect_same_bits(actual[r].out, expected[r].out);
    expect_same_bits(actual[r].grad_x, expected[r].grad_x);
  }
}

// A peer reads the rows in place, and may still be reading long after the others have finished.
TEST(NodesMemory, RowsMayBeOverwrittenAsSoonAsTheirCombineReturns) {
  constexpr int64_t kTokens = 2000;
  constexpr int64_t kWideRow = 1024;
  const DispatchConfig config{.num_experts = 2,
                              .top_k = 1,
                              .width = kWideRow,
                              .capacity = {},
                              .placement = {},
                              .max_rows = {}};
  for (const std::string& strategy : strategy_names()) {
    run_ranks(2, [&](Group& group) {
      // Rank 0 has all rows and rank 1 all tokens.
      const int64_t T = group.rank() == 0 ? 0 : kTokens;
      Dispatcher dispatcher(group, config, strategy);
      const std::vector<int32_t> ids(static_cast<size_t>(T), 0);
      const std::vector<float> weights(static_cast<size_t>(T), 1.0f);
      const Plan plan = dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {T, 1}),
                                                .weights = ConstTensorView(weights.data(), {T, 1}),
                                                .mask = {}});
      for (const bool backward : {false, true}) {
        const OwnedTensor y = dispatcher.allocate_rows(plan, DType::kF32);
        std::fill(y.view.as<float>().begin(), y.view.as<float>().end(), 1.0f);
        const OwnedTensor out = backward ? dispatcher.dispatch_backward(plan, y.view)
                                         : dispatcher.combine(plan, y.view);
        std::fill(y.view.as<float>().begin(), y.view.as<float>().end(), -1.0f);
        const std::span<const float> values = out.view.as<float>();
        EXPECT_EQ(std::count(values.begin(), values.end(), 1.0f), std::ssize(values)) << strategy;
      }
    });
  }
}

TEST(NodesMemory, StagingBytesMustBeAlike) {
  for (const char* strategy : {"direct", "hierarchical"}) {
    run_ranks(4,
              [&](Group& group) {
                GroupOptions options = group.options();
                if (group.rank() == 3) options.staging_bytes /= 2;
                Group own(group.communicator().subgroup(std::vector<int>{0, 1, 2, 3}), options);
                const RankInput input = make_input(group.rank());
                Dispatcher dispatcher(own,
                                      {.num_experts = kExperts,
                                       .top_k = kTopK,
                                       .width = kWidth,
                                       .capacity = {},
                                       .placement = {},
                                       .max_rows = {}},
                                      strategy);
                std::string message = "nothing was thrown";
                try {
                  static_cast<void>(dispatcher.plan(
                      Routing{.expert_ids = ConstTensorView(input.ids.data(), {input.T, kTopK}),
                              .weights = ConstTensorView(input.weights.data(), {input.T, kTopK}),
                              .mask = {}}));
                } catch (const Error& error) {
                  message = error.what();
                  EXPECT_EQ(error.context().culprit, 3);
                }
                EXPECT_THAT(message, testing::HasSubstr("rank 3 has staging_bytes="));
              },
              {.ranks_per_node = 2});
  }
}

TEST(PartialSumsOfNodes, OfFp64HaveFp64Weights) {
  for (const std::string& strategy : strategy_names()) {
    run_ranks(4,
              [&](Group& group) {
                Dispatcher dispatcher(group,
                                      {.num_experts = 4,
                                       .top_k = 2,
                                       .width = 1,
                                       .capacity = {},
                                       .placement = {},
                                       .partial_sums = PartialSums::kF32},
                                      strategy);
                const int32_t far = (group.rank() + 2) % 4;  // on the other node
                const std::vector<int32_t> ids = {far, -1, group.rank(), -1};
                const std::vector<double> weights = {0.1, 0, 1.0 / 3.0, 0};
                const std::vector<double> x = {1.0, 1.0};
                const Plan plan =
                    dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {2, 2}),
                                            .weights = ConstTensorView(weights.data(), {2, 2}),
                                            .mask = {}});
                const DispatchResult sent =
                    dispatcher.dispatch(plan, {.x = ConstTensorView(x.data(), {2, 1})});
                const OwnedTensor out = dispatcher.combine(plan, sent.rows.view);
                EXPECT_EQ(out.view.as<double>()[0], 0.1) << strategy;
                EXPECT_EQ(out.view.as<double>()[1], 1.0 / 3.0) << strategy;
              },
              {.ranks_per_node = 2});
  }
}

TEST(ForeignRows, CostACopyWhichIsRecordedAndTheLibrarysOwnNone) {
  for (const bool own_memory : {false, true}) {
    run_ranks(2, [&](Group& group) {
      Dispatcher dispatcher(group,
                            {.num_experts = 2,
                             .top_k = 1,
                             .width = kWidth,
                             .capacity = {},
                             .placement = {},
                             .max_rows = {}},
                            "direct");
      const std::vector<int32_t> ids = {0, 1, 1};
      const std::vector<float> weights(3, 1.0f);
      const std::vector<float> x(3 * kWidth, 2.0f);
      const Plan plan = dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {3, 1}),
                                                .weights = ConstTensorView(weights.data(), {3, 1}),
                                                .mask = {}});
      std::vector<float> rows(static_cast<size_t>(plan.num_rows() * kWidth));
      DispatchArgs args;
      args.x = ConstTensorView(x.data(), {3, kWidth});
      if (own_memory) args.rows = TensorView(rows.data(), {plan.num_rows(), kWidth});
      const DispatchResult result = dispatcher.dispatch(plan, args);
      static_cast<void>(dispatcher.combine(plan, result.rows.view));
      int64_t copied_bytes = 0;
      for (const Event& event : group.recorder().events()) {
        if (std::string(event.phase) == "copy of foreign rows") copied_bytes += event.bytes;
      }
      EXPECT_EQ(copied_bytes, own_memory ? 2 * result.rows.view.num_bytes() : 0);
    });
  }
}

std::vector<NodesCase> all_cases() {
  std::vector<NodesCase> cases;
  for (const char* strategy : {"direct", "hierarchical"}) {
    for (const auto& [size, ranks_per_node] :
         std::vector<std::pair<int, int>>{{1, 0}, {4, 0}, {4, 2}, {4, 1}, {7, 3}, {8, 4}, {8, 5}}) {
      cases.push_back({strategy, size, ranks_per_node});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(AllTopologies, Nodes, testing::ValuesIn(all_cases()),
                         [](const testing::TestParamInfo<NodesCase>& info) {
                           return info.param.strategy + "_" + std::to_string(info.param.size) +
                                  "_by_" + std::to_string(info.param.ranks_per_node);
                         });

}  // namespace
}  // namespace crossdock
