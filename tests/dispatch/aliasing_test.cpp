// An output that shares memory with an input, or with another output, is refused by all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/threads.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int64_t kWidth = 4;
constexpr int64_t kTokens = 2;

// Two tokens with one route each on every rank, to expert 0 and to the rank's own; memory for
// tokens and rows in one piece.
struct Memory {
  std::vector<int32_t> ids;
  std::vector<float> weights = {0.5F, 0.25F};
  std::vector<float> values = std::vector<float>(64, 1.0F);

  explicit Memory(int rank) : ids{0, rank} {}
  Routing routing() const {
    return {.expert_ids = {ids.data(), {kTokens, 1}}, .weights = {weights.data(), {kTokens, 1}}};
  }
  TensorView at(size_t offset, int64_t num_rows) {
    return {values.data() + offset, {num_rows, kWidth}};
  }
};

using AnyCall = std::function<void(Dispatcher&, const Plan&, Memory&, bool is_wrong)>;

// Rank 1 makes the call with tensors that overlap; all ranks get its error and can continue.
void expect_refusal(const std::string& words, const AnyCall& call) {
  for (const std::string& strategy : strategy_names()) {
    SCOPED_TRACE(strategy);
    run_ranks(kRanks, [&](Group& group) {
      Dispatcher dispatcher(group, {.num_experts = 3, .top_k = 1, .width = kWidth}, strategy);
      Memory memory(group.rank());
      const Plan plan = dispatcher.plan(memory.routing());
      EXPECT_THAT(message_of([&] { call(dispatcher, plan, memory, group.rank() == 1); }),
                  HasSubstr("rank 1: " + words))
          << "rank " << group.rank();
      EXPECT_FALSE(group.is_poisoned());
      call(dispatcher, plan, memory, false);
    });
  }
}

TEST(Aliasing, RowsThatAreTheTokens) {
  expect_refusal("rows overlaps x; outputs must have memory of their own",
                 [](Dispatcher& dispatcher, const Plan& plan, Memory& memory, bool is_wrong) {
                   dispatcher.dispatch(plan,
                                       {.x = memory.at(0, kTokens),
                                        .rows = memory.at(is_wrong ? 0 : 32, plan.num_rows())});
                 });
}

TEST(Aliasing, RowsThatShareOneValueWithTheTokens) {
  expect_refusal("rows overlaps x", [](Dispatcher& dispatcher, const Plan& plan, Memory& memory,
                                       bool is_wrong) {
    const size_t end = kTokens * kWidth;
    dispatcher.dispatch(plan, {.x = memory.at(0, kTokens),
                               .rows = memory.at(is_wrong ? end - 1 : end, plan.num_rows())});
  });
}

TEST(Aliasing, ScalesOfRowsThatAreThoseOfTheTokens) {
  expect_refusal("row_scales overlaps scales", [](Dispatcher& dispatcher, const Plan& plan,
                                                  Memory& memory, bool is_wrong) {
    std::vector<F8E4M3> x(kTokens * kWidth);
    float* scales = memory.values.data();
    dispatcher.dispatch(
        plan, {.x = {x.data(), {kTokens, kWidth}},
               .scales = {scales, {kTokens, 1}},
               .row_scales = TensorView(scales + (is_wrong ? 0 : 32), {plan.num_rows(), 1})});
  });
}

TEST(Aliasing, ACombineIntoItsRows) {
  expect_refusal("out overlaps rows",
                 [](Dispatcher& dispatcher, const Plan& plan, Memory& memory, bool is_wrong) {
                   const TensorView out = memory.at(is_wrong ? 0 : 32, kTokens);
                   dispatcher.combine(plan, memory.at(0, plan.num_rows()), out);
                 });
}

TEST(Aliasing, ABackwardIntoItsRows) {
  expect_refusal("out overlaps rows", [](Dispatcher& dispatcher, const Plan& plan, Memory& memory,
                                         bool is_wrong) {
    const TensorView out = memory.at(is_wrong ? 3 : 32, kTokens);
    dispatcher.finish(dispatcher.begin_combine(plan, memory.at(32 + 8, plan.num_rows()), {}));
    dispatcher.dispatch_backward(plan, memory.at(0, plan.num_rows()), out);
  });
}

TEST(Aliasing, EmptyTensorsOverlapNothing) {
  run_ranks(2, [](Group& group) {
    Dispatcher dispatcher(group, {.num_experts = 2, .top_k = 1, .width = kWidth}, "direct");
    std::vector<float> values(16, 1.0F);
    const std::vector<int32_t> ids = {-1};
    const std::vector<float> weights = {1.0F};
    const Plan plan =
        dispatcher.plan({.expert_ids = {ids.data(), {1, 1}}, .weights = {weights.data(), {1, 1}}});
    ASSERT_EQ(plan.num_rows(), 0);
    const TensorView x(values.data(), {1, kWidth});
    const TensorView rows(values.data() + 2, {0, kWidth});
    dispatcher.dispatch(plan, {.x = x, .rows = rows});
    dispatcher.combine(plan, rows, x);
    EXPECT_EQ(values[0], 0.0F);
  });
}

}  // namespace
}  // namespace crossdock
