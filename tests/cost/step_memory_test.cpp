#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "comm/memory/window.hpp"
#include "cost/step_sizes.hpp"
#include "crossdock/crossdock.hpp"
#include "dispatch/random_case.hpp"

namespace crossdock {
namespace {

constexpr int64_t kWidth = 64;
constexpr int64_t kExperts = 16;
constexpr int64_t kStaging = 1 << 20;

struct Held {
  double window_bytes = 0;
  double pool_bytes = 0;
};

struct MemoryCase {
  int num_ranks = 0;
  int ranks_per_node = 0;
  PartialSums partial_sums = PartialSums::kNone;
  int64_t tokens = 0;
  std::optional<Capacity> capacity{};
  int64_t top_k = 5;
  bool keep_empty_segments = false;
  DType dtype = DType::kF32;
};

DispatchConfig config_of(const MemoryCase& c) {
  return {.num_experts = kExperts,
          .top_k = c.top_k,
          .width = kWidth,
          .alignment = 8,
          .capacity = c.capacity,
          .placement = {},
          .partial_sums = c.partial_sums,
          .keep_empty_segments = c.keep_empty_segments};
}

CostInputs inputs_of(const MemoryCase& c) {
  CostInputs inputs{.config = config_of(c),
                    .topology = Topology::uniform(c.num_ranks, c.ranks_per_node),
                    .tokens = c.tokens,
                    .dtype = c.dtype};
  inputs.staging_bytes = kStaging;
  return inputs;
}

using RouteMaker = std::function<std::vector<int32_t>(const MemoryCase& c, std::mt19937& random)>;

std::vector<int32_t> random_ids(const MemoryCase& c, std::mt19937& random) {
  std::vector<int32_t> experts(kExperts);
  std::iota(experts.begin(), experts.end(), 0);
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    ids.insert(ids.end(), experts.begin(), experts.begin() + c.top_k);
  }
  return ids;
}

// Every token goes to the first experts, which with two ranks are all on rank 0.
std::vector<int32_t> ids_to_rank_0(const MemoryCase& c, std::mt19937& /*random*/) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int32_t k = 0; k < c.top_k; ++k) ids.push_back(k);
  }
  return ids;
}

// A layer's calls to the dispatcher in one step.
void run_step(Dispatcher& dispatcher, const std::vector<int32_t>& ids, DType dtype) {
  const int64_t K = dispatcher.config().top_k;
  const auto T = static_cast<int64_t>(ids.size()) / K;
  const std::vector<float> weights(ids.size(), 0.5f);
  const Buffer x(T * kWidth * size_of(dtype));  // any values
  const Plan plan = dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {T, K}),
                                            .weights = ConstTensorView(weights.data(), {T, K})});
  DispatchArgs args;
  args.x = x.view(dtype, {T, kWidth});
  const DispatchResult rows = dispatcher.dispatch(plan, args);
  OwnedTensor out;
  {
    const OwnedTensor y = dispatcher.allocate_rows(plan, dtype);
    out = dispatcher.combine(plan, y.view);
  }
  args.with_row_weights = true;
  const DispatchResult grad_y = dispatcher.dispatch(plan, args);
  const OwnedTensor grad_rows = dispatcher.allocate_rows(plan, dtype);
  const OwnedTensor grad_row_weights =
      dispatcher.group().pool().take(DType::kF32, {plan.num_rows()});
  const OwnedTensor grad_x = dispatcher.dispatch_backward(plan, grad_rows.view);
  static_cast<void>(dispatcher.collect_routes(plan, grad_row_weights.view));
}

// The most memory that any rank holds after some steps with different routes.
Held run(const MemoryCase& c, const std::string& strategy, const RouteMaker& make_ids) {
  std::vector<Held> held(static_cast<size_t>(c.num_ranks));
  ThreadOptions options = short_deadlines();
  options.ranks_per_node = c.ranks_per_node;
  options.group.staging_bytes = kStaging;
  run_ranks(
      c.num_ranks,
      [&](Group& group) {
        std::mt19937 random(static_cast<unsigned>(group.rank()));
        Dispatcher dispatcher(group, config_of(c), strategy);
        for (int step = 0; step < 5; ++step) run_step(dispatcher, make_ids(c, random), c.dtype);
        held[static_cast<size_t>(group.rank())] = {
            static_cast<double>(comm::windows_of(group).bytes_held()),
            static_cast<double>(group.pool().bytes_held())};
      },
      options);
  return *std::max_element(held.begin(), held.end(), [](const Held& a, const Held& b) {
    return a.window_bytes + a.pool_bytes < b.window_bytes + b.pool_bytes;
  });
}

TEST(StepMemory, OfARealRunIsWithinTenPercentOfThePlan) {
  using enum PartialSums;
  constexpr DType kBF16 = DType::kBF16;
  for (const MemoryCase& c :
       {MemoryCase{1, 1, kNone, 1500}, MemoryCase{4, 4, kNone, 1500}, MemoryCase{4, 4, kF32, 1500},
        MemoryCase{8, 4, kNone, 1500}, MemoryCase{8, 4, kF32, 1500}, MemoryCase{6, 2, kNone, 1500},
        // The tokens of all ranks are twice as many as the rows of one, or equally many.
        MemoryCase{4, 4, kNone, 1500, {}, 2}, MemoryCase{8, 8, kNone, 1500, {}, 4},
        MemoryCase{8, 4, kF32, 1500, {}, 4}, MemoryCase{4, 2, kNone, 1500, {}, 4},
        MemoryCase{2, 2, kNone, 1500, {}, 1}, MemoryCase{2, 2, kF32, 1500, {}, 1},
        // Partial sums as large as rows, and twice as large.
        MemoryCase{4, 4, kRowType, 1500, {}, 5, false, kBF16},
        MemoryCase{8, 4, kRowType, 1500, {}, 5, false, kBF16},
        MemoryCase{6, 2, kRowType, 1500, {}, 4, false, kBF16},
        MemoryCase{8, 4, kF32, 1500, {}, 5, false, kBF16}}) {
    for (const StrategyCost& cost : estimate_costs(inputs_of(c)).strategies) {
      SCOPED_TRACE(cost.name + " on " + std::to_string(c.num_ranks) + " ranks, " +
                   std::to_string(c.ranks_per_node) + " per node, " +
                   std::string(name_of(c.dtype)) + ", partial sums " +
                   std::string(name_of(c.partial_sums)));
      const Held held = run(c, cost.name, random_ids);
      const MemoryNeed& plan = cost.memory.expected;
      EXPECT_NEAR((held.window_bytes + held.pool_bytes) / (plan.window_bytes + plan.pool_bytes),
                  1.0, 0.1);
    }
  }
}

// Half of the ranks' rows are on another node.
TEST(StepMemory, OfTheWorstRoutesIsWithinTenPercentOfTheWorstCase) {
  for (const int ranks_per_node : {1, 2}) {
    const MemoryCase c{2, ranks_per_node, PartialSums::kNone, 1000};
    for (const StrategyCost& cost : estimate_costs(inputs_of(c)).strategies) {
      SCOPED_TRACE(cost.name + ", ranks per node " + std::to_string(ranks_per_node));
      const Held held = run(c, cost.name, ids_to_rank_0);
      const MemoryNeed& plan = cost.memory.worst_case;
      EXPECT_NEAR((held.window_bytes + held.pool_bytes) / (plan.window_bytes + plan.pool_bytes),
                  1.0, 0.1);
      EXPECT_GT(plan.total(), 1.5 * cost.memory.expected.total());
    }
  }
}

// Experts without rows, most of them with few tokens, get a pad row per alignment unit.
TEST(StepMemory, CountsTheRowsOfExpertsThatAreKeptEmpty) {
  MemoryCase c{2, 2, PartialSums::kNone, 1};
  const auto bytes = [&](bool kept, const auto& need) {
    c.keep_empty_segments = kept;
    return need(estimate_costs(inputs_of(c)).strategies.front().memory).total();
  };
  const auto expected = [](const StepMemory& memory) { return memory.expected; };
  const auto worst = [](const StepMemory& memory) { return memory.worst_case; };
  EXPECT_GT(bytes(true, expected), bytes(false, expected));
  c.tokens = 7;  // 126 rows in the worst case, 134 with kept segments: they need another page
  EXPECT_GT(bytes(true, worst), bytes(false, worst));
  c.tokens = 100000;  // no expert stays empty
  EXPECT_EQ(bytes(true, expected), bytes(false, expected));
}

TEST(StepMemory, StaysWithinWhatACapacityAllows) {
  for (const int ranks_per_node : {1, 2}) {
    const MemoryCase c{2, ranks_per_node, PartialSums::kNone, 1000, Capacity{.factor = 1.5}};
    for (const StrategyCost& cost : estimate_costs(inputs_of(c)).strategies) {
      SCOPED_TRACE(cost.name + ", ranks per node " + std::to_string(ranks_per_node));
      const MemoryNeed& plan = cost.memory.with_capacity.value();
      EXPECT_LT(plan.total(), cost.memory.worst_case.total());
      for (const RouteMaker& make_ids : {RouteMaker(ids_to_rank_0), RouteMaker(random_ids)}) {
        const Held held = run(c, cost.name, make_ids);
        EXPECT_LE(held.window_bytes + held.pool_bytes,
                  1.01 * (plan.window_bytes + plan.pool_bytes));
      }
    }
  }
}

}  // namespace
}  // namespace crossdock
