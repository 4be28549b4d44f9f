#include "crossdock/dispatcher.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "crossdock/extend/strategy.hpp"
#include "crossdock/fp8.hpp"
#include "crossdock/tensor.hpp"
#include "dispatch/random_case.hpp"

namespace crossdock {
namespace {

using reference::PerRank;
using reference::to_tensor;
using reference::to_values;

// y = rows scaled by 1 + rank / 4: experts differ, and the values stay exact.
std::vector<double> apply_expert(std::vector<double> rows, int rank) {
  for (double& value : rows) value *= 1.0 + rank / 4.0;
  return rows;
}

// The ranks' results, [P] each, as doubles for the reference.
struct Results {
  explicit Results(int P) {
    for (PerRank* field : {&rows, &row_weights, &y, &out, &grad_x, &grad_rows, &grad_weights}) {
      field->resize(static_cast<size_t>(P));
    }
  }
  PerRank rows, row_weights, y, out, grad_x, grad_rows, grad_weights;
};

// One step of one rank, in two halves, so others may run in between.
struct Step {
  Plan plan;
  OwnedTensor y;

  void forward(Dispatcher& dispatcher, const RankTensors& tensors, Results& results) {
    const int rank = dispatcher.group().rank();
    const auto r = static_cast<size_t>(rank);
    plan = dispatcher.plan(tensors.routing());
    const DispatchResult sent =
        dispatcher.dispatch(plan, {.x = tensors.x.view, .with_row_weights = true});
    results.rows[r] = to_values(sent.rows.view);
    results.row_weights[r] = to_values(sent.row_weights.view);
    y = to_tensor(sent.rows.view.dtype, sent.rows.view.shape, apply_expert(results.rows[r], rank));
    results.y[r] = to_values(y.view);
    results.out[r] = to_values(dispatcher.combine(plan, y.view));
  }

  void backward(Dispatcher& dispatcher, const RankTensors& tensors, Results& results) const {
    const auto r = static_cast<size_t>(dispatcher.group().rank());
    const CombineBackwardResult grads =
        dispatcher.combine_backward(plan, tensors.grad_out.view, y.view);
    results.grad_rows[r] = to_values(grads.grad_rows.view);
    results.grad_weights[r] = to_values(grads.grad_weights.view);
    results.grad_x[r] = to_values(dispatcher.dispatch_backward(plan, grads.grad_rows.view));
  }
};

void expect_same_bits(const char* what, const PerRank& got, const PerRank& wanted) {
  for (size_t r = 0; r < got.size(); ++r) {
    ASSERT_EQ(got[r].size(), wanted[r].size()) << what << " of rank " << r;
    const auto difference = reference::compare(got[r], wanted[r]);
    EXPECT_EQ(difference.num_different, 0)
        << what << " of rank " << r << " differs first at " << difference.first;
  }
}

PerRank field_of(const DispatchCase& test_case, std::vector<double> reference::RankInput::*field) {
  PerRank result;
  for (const auto& input : test_case.ranks) result.push_back(input.*field);
  return result;
}

void expect_right(const DispatchCase& test_case, DType dtype, const Results& results) {
  const auto layout = reference::lay_out(test_case.config, test_case.ranks);
  const int64_t D = test_case.config.width;
  const PerRank weights = field_of(test_case, &reference::RankInput::weights);
  const PerRank x = field_of(test_case, &reference::RankInput::x);
  const PerRank grad_out = field_of(test_case, &reference::RankInput::grad_out);
  expect_same_bits("rows", results.rows, reference::dispatch(layout, D, x));
  expect_same_bits("row_weights", results.row_weights, reference::dispatch_routes(layout, weights));
  expect_same_bits("out", results.out,
                   reference::combine_exact(layout, D, dtype, results.y, &weights));
  auto grads = reference::combine_backward(layout, D, grad_out, results.y, weights);
  for (auto& rows : grads.rows) {
    for (double& value : rows) value = reference::round_to(dtype, value);
  }
  expect_same_bits("grad_weights", results.grad_weights, grads.weights);
  expect_same_bits("grad_rows", results.grad_rows, grads.rows);
  expect_same_bits("grad_x", results.grad_x,
                   reference::combine_exact(layout, D, dtype, results.grad_rows));
}

// Powers of two as a tensor of scales.
OwnedTensor scales_as(DType dtype, const Shape& shape, const std::vector<double>& scales) {
  if (dtype == DType::kF32) return to_tensor(dtype, shape, scales);
  const Buffer buffer(static_cast<int64_t>(scales.size()));
  for (size_t i = 0; i < scales.size(); ++i) {
    buffer.data()[i] = static_cast<std::byte>(127 + std::ilogb(scales[i]));
  }
  return {.view = buffer.view(DType::kE8M0, shape), .owner = buffer.owner()};
}

struct Setting {
  std::string strategy;
  int P;
};

class EveryStrategy : public testing::TestWithParam<Setting> {
 protected:
  // Different counts on every rank, 0 on the second.
  static std::vector<int64_t> uneven_tokens() {
    std::vector<int64_t> tokens(static_cast<size_t>(GetParam().P));
    for (size_t r = 0; r < tokens.size(); ++r)
      tokens[r] = r == 1 ? 0 : 13 - static_cast<int64_t>(r);
    return tokens;
  }

  static void run_on_ranks(const std::function<void(Group&)>& body) {
    run_ranks(GetParam().P, body, short_deadlines());
  }

  static void expect_right_on_ranks(const DispatchCase& test_case, DType dtype) {
    Results results(GetParam().P);
    run_on_ranks([&](Group& group) {
      Dispatcher dispatcher(group, test_case.config, GetParam().strategy);
      const auto& input = test_case.ranks[static_cast<size_t>(group.rank())];
      const RankTensors tensors = tensors_of(test_case.config, input, dtype);
      Step step;
      step.forward(dispatcher, tensors, results);
      step.backward(dispatcher, tensors, results);
    });
    expect_right(test_case, dtype, results);
  }
};

TEST_P(EveryStrategy, MovesRowsInTheDefinedOrderAndSumsThemInSlotOrder) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    expect_right_on_ranks(random_case({.num_experts = 10, .top_k = 4, .width = 5, .alignment = 8},
                                      uneven_tokens(), 1),
                          dtype);
  }
}

TEST_P(EveryStrategy, WorksWithoutAnyToken) {
  const std::vector<int64_t> no_tokens(static_cast<size_t>(GetParam().P), 0);
  expect_right_on_ranks(random_case({.num_experts = 3, .top_k = 3, .width = 4}, no_tokens, 2),
                        DType::kF32);
}

TEST_P(EveryStrategy, FollowsPlacementAndCapacity) {
  for (const bool pad : {false, true}) {
    DispatchConfig config{.num_experts = 6, .top_k = 2, .width = 3};
    config.capacity = Capacity{
        .factor = 0.7, .policy = DropPolicy::kWeight, .pad_to_capacity = pad, .max_tokens = 13};
    for (int e = 0; e < 6; ++e) config.placement.push_back((e * e + 1) % GetParam().P);
    expect_right_on_ranks(random_case(config, uneven_tokens(), 3), DType::kF32);
  }
}

TEST_P(EveryStrategy, PartialSumsOfExactValuesAreExact) {
  // All sums are exact in fp32 in any order, so the bits must equal those of the exact mode.
  const auto test_case = random_case({.num_experts = 10,
                                      .top_k = 6,
                                      .width = 7,
                                      .alignment = 16,
                                      .partial_sums = PartialSums::kF32},
                                     uneven_tokens(), 4);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    expect_right_on_ranks(test_case, dtype);
  }
}

TEST_P(EveryStrategy, PartialSumsKnowTokensWithoutRoutesFromTheirNeighbours) {
  // All routes go to one expert; the last token of one rank and the first of the next have none.
  const std::vector<int64_t> tokens(static_cast<size_t>(GetParam().P), 2);
  auto test_case = random_case(
      {.num_experts = 1, .top_k = 1, .width = 3, .partial_sums = PartialSums::kF32}, tokens, 6);
  for (size_t r = 0; r < test_case.ranks.size(); ++r) {
    test_case.ranks[r].expert_ids =
        r % 2 == 0 ? std::vector<int64_t>{0, -1} : std::vector<int64_t>{-1, 0};
  }
  expect_right_on_ranks(test_case, DType::kF32);
}

TEST_P(EveryStrategy, LargeRowsGoThroughStreamingStores) {
#if defined(__SANITIZE_THREAD__)
  if (GetParam().P > 2) GTEST_SKIP() << "would take minutes; two ranks have all orders of stores";
#endif
  expect_right_on_ranks(
      random_case({.num_experts = 4, .top_k = 2, .width = 50001}, uneven_tokens(), 5), DType::kF32);
}

TEST_P(EveryStrategy, KeepsSlotOrderWhereItMatters) {
  run_on_ranks([](Group& group) {
    Dispatcher dispatcher(group, {.num_experts = 3, .top_k = 3, .width = 1}, GetParam().strategy);
    const std::vector<int32_t> ids = {0, 1, 2, 2, 0, 1};
    const std::vector<float> weights = {1e8F, 1.0F, -1e8F, 1e8F, -1e8F, 1.0F};
    const std::vector<float> x = {1.0F, 1.0F};
    const Plan plan = dispatcher.plan(Routing{
        .expert_ids = {ids.data(), {2, 3}}, .weights = {weights.data(), {2, 3}}, .mask = {}});
    const auto sent = dispatcher.dispatch(plan, {.x = {x.data(), {2, 1}}});
    const auto out = dispatcher.combine(plan, sent.rows.view);
    EXPECT_EQ(out.view.as<float>()[0], 0.0F);
    EXPECT_EQ(out.view.as<float>()[1], 1.0F);
  });
}

TEST_P(EveryStrategy, KeepsSeveralPlansInFlight) {
  const DispatchConfig config{.num_experts = 9, .top_k = 3, .width = 6};
  std::vector<DispatchCase> cases;
  cases.reserve(3);
  for (unsigned i = 0; i < 3; ++i) cases.push_back(random_case(config, uneven_tokens(), 10 + i));
  std::vector<Results> results(3, Results(GetParam().P));
  run_on_ranks([&](Group& group) {
    const auto r = static_cast<size_t>(group.rank());
    Dispatcher dispatcher(group, config, GetParam().strategy);
    std::vector<RankTensors> tensors;
    tensors.reserve(cases.size());
    for (const auto& one : cases) tensors.push_back(tensors_of(config, one.ranks[r], DType::kF32));
    std::vector<Step> steps(3);
    const auto forward = [&](size_t i) { steps[i].forward(dispatcher, tensors[i], results[i]); };
    const auto backward = [&](size_t i) { steps[i].backward(dispatcher, tensors[i], results[i]); };
    forward(0);
    forward(1);
    backward(0);
    forward(2);
    backward(1);
    backward(2);
  });
  for (size_t i = 0; i < 3; ++i) expect_right(cases[i], DType::kF32, results[i]);
}

TEST_P(EveryStrategy, GivesTheSameWhereCallsAreBegunAndFinished) {
  const DispatchConfig config{.num_experts = 5, .top_k = 2, .width = 4};
  const auto test_case = random_case(config, uneven_tokens(), 14);
  run_on_ranks([&](Group& group) {
    const auto r = static_cast<size_t>(group.rank());
    const auto tensors = tensors_of(config, test_case.ranks[r], DType::kF32);
    Dispatcher dispatcher(group, config, GetParam().strategy);
    const Plan plan = dispatcher.plan(tensors.routing());
    const DispatchResult wanted = dispatcher.dispatch(plan, {.x = tensors.x.view});
    const OwnedTensor wanted_out = dispatcher.combine(plan, wanted.rows.view);
    Pending<DispatchResult> first = dispatcher.begin_dispatch(plan, {.x = tensors.x.view});
    Pending<OwnedTensor> second = dispatcher.begin_combine(plan, wanted.rows.view);
    const DispatchResult sent = dispatcher.finish(std::move(first));
    const OwnedTensor out = dispatcher.finish(std::move(second));
    EXPECT_EQ(to_values(sent.rows.view), to_values(wanted.rows.view));
    EXPECT_EQ(to_values(out.view), to_values(wanted_out.view));
  });
}

TEST_P(EveryStrategy, GetsTheMemoryOfDroppedCallsBack) {
  const DispatchConfig config{.num_experts = 5, .top_k = 2, .width = 4};
  const auto test_case = random_case(config, uneven_tokens(), 15);
  run_on_ranks([&](Group& group) {
    const auto r = static_cast<size_t>(group.rank());
    const auto tensors = tensors_of(config, test_case.ranks[r], DType::kF32);
    Dispatcher dispatcher(group, config, GetParam().strategy);
    const Plan plan = dispatcher.plan(tensors.routing());
    const OwnedTensor y = dispatcher.allocate_rows(plan, DType::kF32);
    std::fill_n(static_cast<float*>(y.view.data), y.view.num_elements(), 1.0F);
    int64_t held = 0;
    for (int step = 0; step < 50; ++step) {
      {
        const auto dropped = dispatcher.begin_dispatch(plan, {.x = tensors.x.view});
        const auto also_dropped = dispatcher.begin_combine(plan, y.view);
      }
      const GroupMemory memory = group.memory();
      if (step == 0) held = memory.pool_bytes + memory.window_bytes;
      EXPECT_EQ(memory.pool_bytes + memory.window_bytes, held) << "step " << step;
    }
  });
}

TEST_P(EveryStrategy, DispatchAndUnweightedCombineAreTransposes) {
  const DispatchConfig config{.num_experts = 5, .top_k = 2, .width = 4, .alignment = 8};
  const auto test_case = random_case(config, uneven_tokens(), 6);
  std::vector<double> left(static_cast<size_t>(GetParam().P));
  std::vector<double> right(left.size());
  run_on_ranks([&](Group& group) {
    const auto r = static_cast<size_t>(group.rank());
    const auto tensors = tensors_of(config, test_case.ranks[r], DType::kF64);
    Dispatcher dispatcher(group, config, GetParam().strategy);
    const Plan plan = dispatcher.plan(tensors.routing());
    const auto sent = dispatcher.dispatch(plan, {.x = tensors.x.view});
    std::vector<double> y;
    for (int64_t i = 0; i < sent.rows.view.num_elements(); ++i) {
      y.push_back(static_cast<double>(i % 13 - 6 + group.rank()));
    }
    const auto y_tensor = to_tensor(DType::kF64, sent.rows.view.shape, y);
    const auto back = to_values(dispatcher.combine_unweighted(plan, y_tensor.view));
    const auto rows = to_values(sent.rows.view);
    left[r] = std::inner_product(rows.begin(), rows.end(), y.begin(), 0.0);
    const auto& x = test_case.ranks[r].x;
    right[r] = std::inner_product(x.begin(), x.end(), back.begin(), 0.0);
  });
  EXPECT_EQ(std::accumulate(left.begin(), left.end(), 0.0),
            std::accumulate(right.begin(), right.end(), 0.0));
}

TEST_P(EveryStrategy, CarriesFp8WithItsScales) {
  for (const DType scale_dtype : {DType::kF32, DType::kE8M0}) {
    const DispatchConfig config{.num_experts = 5, .top_k = 3, .width = 130, .alignment = 8};
    const auto test_case = random_case(config, uneven_tokens(), 7);
    const int64_t num_scales = scale_dtype == DType::kF32 ? 2 : 5;
    const auto layout = reference::lay_out(config, test_case.ranks);
    // Powers of two: value and scale together are exact, and differ for every token.
    const auto scale_of = [&](int rank, int64_t i) {
      return std::ldexp(1.0, static_cast<int>(i % 11) + rank);
    };
    PerRank values;  // [P][T, D], value times scale
    for (int rank = 0; rank < GetParam().P; ++rank) {
      std::vector<double> rank_values;
      const auto& input = test_case.ranks[static_cast<size_t>(rank)];
      for (size_t i = 0; i < input.x.size(); ++i) {
        const auto token = static_cast<int64_t>(i) / 130;
        const auto group = static_cast<int64_t>(i) % 130 / fp8_group_size(scale_dtype);
        rank_values.push_back(reference::round_to(DType::kF8E4M3, input.x[i]) *
                              scale_of(rank, token * num_scales + group));
      }
      values.push_back(std::move(rank_values));
    }
    PerRank arrived(values.size());
    run_on_ranks([&](Group& group) {
      const auto r = static_cast<size_t>(group.rank());
      const auto& input = test_case.ranks[r];
      const auto tensors = tensors_of(config, input, DType::kF8E4M3);
      std::vector<double> scales;
      for (int64_t i = 0; i < input.T * num_scales; ++i) {
        scales.push_back(scale_of(group.rank(), i));
      }
      const auto scale_tensor = scales_as(scale_dtype, {input.T, num_scales}, scales);
      Dispatcher dispatcher(group, config, GetParam().strategy);
      const Plan plan = dispatcher.plan(tensors.routing());
      const auto sent =
          dispatcher.dispatch(plan, {.x = tensors.x.view, .scales = scale_tensor.view});
      const Buffer rows(sent.rows.view.num_elements() * 2);
      const TensorView out = rows.view(DType::kBF16, sent.rows.view.shape);
      dequantise_rows({.values = sent.rows.view, .scales = sent.row_scales.view, .out = out});
      arrived[r] = to_values(out);
    });
    expect_same_bits("rows", arrived, reference::dispatch(layout, 130, values));
  }
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const std::string& strategy : strategy_names()) {
    for (const int P : {1, 2, 4, 7}) all.push_back({strategy, P});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Threads, EveryStrategy, testing::ValuesIn(settings()),
                         [](const auto& info) {
                           return info.param.strategy + "_" + std::to_string(info.param.P);
                         });

using Lines = std::vector<std::string>;

// What two ranks say when they make a dispatcher.
Lines lines_of(LogLevel level, std::string_view strategy, bool throws = false) {
  std::mutex mutex;
  Lines lines;
  const OnLog on_log = [&](LogLevel /*level*/, const std::string& line) {
    const std::lock_guard lock(mutex);
    lines.push_back(line);
    if (throws) throw std::runtime_error("ignored");
  };
  run_ranks(2,
            [&](Group& group) {
              const Dispatcher dispatcher(group, {.num_experts = 4, .top_k = 2, .width = 4},
                                          strategy);
            },
            {.group = {.on_log = on_log, .log_level = level}});
  return lines;
}

TEST(Log, SharedChoicesComeFromRankZeroAlone) {
  const Lines lines = lines_of(LogLevel::kInfo, "auto");
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0], "rank 0 of 2: ranks: 2, nodes: 1, communicator: threads");
  EXPECT_TRUE(lines[1].starts_with("rank 0 of 2: strategy direct: ")) << lines[1];
  EXPECT_EQ(lines_of(LogLevel::kInfo, "alltoall").back(),
            "rank 0 of 2: strategy alltoall: as given");
}

TEST(Log, LevelsAndListenersThatThrowChangeNothingElse) {
  EXPECT_TRUE(lines_of(LogLevel::kNone, "auto").empty());
  EXPECT_EQ(lines_of(LogLevel::kDebug, "auto").size(), 4U);
  EXPECT_EQ(lines_of(LogLevel::kInfo, "auto", /*throws=*/true).size(), 2U);
}

}  // namespace
}  // namespace crossdock
