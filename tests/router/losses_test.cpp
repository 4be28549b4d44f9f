#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "crossdock/error.hpp"
#include "crossdock/router.hpp"
#include "router/router_case.hpp"
#include "support/slope.hpp"

namespace crossdock {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;

RouterConfig loss_config(Score score = Score::kSoftmax) {
  return {.num_experts = 4,
          .top_k = 2,
          .width = 3,
          .dtype = DType::kF64,
          .score = score,
          .aux_loss_coeff = 0.3,
          .z_loss_coeff = 0.2};
}

TEST(RouterLosses, ZLossOfZeroLogitsIsTheSquareOfLog4) {
  auto input = make_router_input(loss_config(), 5);
  std::fill(input.gate.begin(), input.gate.end(), 0.0);
  const RouterRun run(input);
  EXPECT_NEAR(run.router().losses(run.route()).z, 0.2 * 1.9218120557, 1e-10);
}

TEST(RouterLosses, AuxiliaryLossOfUniformRoutingIsItsCoefficient) {
  for (const Score score : {Score::kSoftmax, Score::kSoftmaxAfterTopK, Score::kSigmoid}) {
    RouterConfig config = loss_config(score);
    config.force_balance = true;
    auto input = make_router_input(config, 6);
    std::fill(input.gate.begin(), input.gate.end(), 0.0);
    const RouterRun run(input);
    EXPECT_NEAR(run.router().losses(run.route()).aux, 0.3, 1e-14);
  }
}

TEST(RouterLosses, AuxiliaryLossOfOneFavouriteIsCoefficientTimesExperts) {
  RouterConfig config = loss_config();
  config.top_k = 1;
  config.width = 1;
  auto input = make_router_input(config, 7);
  std::fill(input.x.begin(), input.x.end(), 1.0);
  input.gate = {1000.0, 0.0, 0.0, 0.0};
  const RouterRun run(input);
  EXPECT_NEAR(run.router().losses(run.route()).aux, 0.3 * 4, 1e-13);
}

// The tokens of `all` from `first` on, as another rank would hold them.
reference::RouterInput part_of(const reference::RouterInput& all, int64_t first, int64_t T) {
  auto part = all;
  const int64_t D = all.config.width;
  part.T = T;
  part.x.assign(all.x.begin() + first * D, all.x.begin() + (first + T) * D);
  if (!all.sequence_ids.empty()) {
    part.sequence_ids.assign(all.sequence_ids.begin() + first,
                             all.sequence_ids.begin() + first + T);
  }
  return part;
}

// Losses and gradients of three ranks (one without tokens) add up to those of one rank with all.
void expect_ranks_add_up(const reference::RouterInput& all) {
  const RouterRun whole(all);
  const RouterOutput output = whole.route();
  const RouterLosses wanted = whole.router().losses(output);
  const auto wanted_grads = whole.backward(output, std::vector<double>(20, 0.0));
  RouterLosses sum;
  std::vector<double> grad_x;
  std::vector<RouterOutput> outputs;
  RouterStatistics statistics;
  const std::vector<std::pair<int64_t, int64_t>> parts = {{0, 4}, {4, 0}, {4, 6}};
  for (const auto& [first, T] : parts) {
    outputs.push_back(RouterRun(part_of(all, first, T)).route());
    if (outputs.size() == 1) {
      statistics = outputs[0].statistics;
    } else {
      statistics.add(outputs.back().statistics);
    }
  }
  EXPECT_EQ(statistics.load(), output.statistics.load());
  for (size_t r = 0; r < parts.size(); ++r) {
    const auto [first, T] = parts[r];
    const RouterRun run(part_of(all, first, T));
    const LossCounts counts{.statistics = &statistics};
    const RouterLosses losses = run.router().losses(outputs[r], counts);
    sum.aux += losses.aux;
    sum.z += losses.z;
    const auto grads =
        run.backward(outputs[r], std::vector<double>(static_cast<size_t>(T * 2), 0.0), counts);
    grad_x.insert(grad_x.end(), grads.x.begin(), grads.x.end());
  }
  EXPECT_NEAR(sum.aux, wanted.aux, 1e-14);
  EXPECT_NEAR(sum.z, wanted.z, 1e-14);
  EXPECT_EQ(grad_x, wanted_grads.x);
}

TEST(RouterLosses, OfTheRanksSumToTheGroups) {
  expect_ranks_add_up(make_router_input(loss_config(), 10));
}

TEST(RouterLosses, PerSequenceOfTheRanksSumToTheGroupsAlsoWhereASequenceIsCut) {
  RouterConfig config = loss_config(Score::kSigmoid);
  config.aux_loss_scope = BalanceScope::kSequence;
  auto input = make_router_input(config, 10);
  input.sequence_ids = {0, 0, 0, 1, 1, 1, 1, 2, 2, 2};
  input.num_sequences = 3;
  expect_ranks_add_up(input);
}

TEST(RouterLosses, PerSequenceIsTheMeanOfEachSequencesOwn) {
  RouterConfig config = loss_config();
  config.aux_loss_scope = BalanceScope::kSequence;
  auto input = make_router_input(config, 10);
  input.sequence_ids = {0, 0, 0, 0, 1, 1, 1, 1, 1, 1};
  input.num_sequences = 2;
  const RouterRun run(input);
  const double together = run.router().losses(run.route()).aux;
  double apart = 0.0;
  for (const auto& [first, T] : {std::pair<int64_t, int64_t>{0, 4}, {4, 6}}) {
    auto one = part_of(input, first, T);
    one.sequence_ids.clear();
    one.num_sequences = 1;
    const RouterRun single(one);
    apart += single.router().losses(single.route()).aux / 2;
  }
  EXPECT_NEAR(together, apart, 1e-15);
  const LossCounts of_eight{.statistics = nullptr, .total_sequences = 8, .total_tokens = 40};
  const RouterLosses spread = run.router().losses(run.route(), of_eight);
  EXPECT_NEAR(spread.aux, apart * 2 / 8, 1e-15);
  EXPECT_NEAR(spread.z, run.router().losses(run.route()).z / 4, 1e-15);
}

TEST(RouterLosses, RefuseCountsThatCannotBe) {
  const RouterRun run(make_router_input(loss_config(), 4));
  const RouterOutput output = run.route();
  const auto losses = [&](double total_sequences, int64_t total_tokens) {
    (void)run.router().losses(
        output,
        {.statistics = nullptr, .total_sequences = total_sequences, .total_tokens = total_tokens});
  };
  EXPECT_NO_THROW(losses(0.0, 0));
  EXPECT_THROW(losses(-1.0, 0), Error);
  EXPECT_THROW(losses(std::nan(""), 0), Error);
  EXPECT_THROW(losses(0.0, -1), Error);
}

// The objective that backward differentiates.
double objective(const reference::RouterInput& input, double jitter) {
  auto with_jitter = input;
  with_jitter.config.jitter = jitter;
  const RouterRun run(with_jitter);
  const RouterOutput output = run.route();
  const RouterLosses losses = run.router().losses(output);
  const auto weights = RouterRun::weights(output);
  const auto grads = some_grad_weights(input.T, input.config.top_k);
  return std::inner_product(weights.begin(), weights.end(), grads.begin(), 0.0) + losses.aux +
         losses.z;
}

void expect_slopes(reference::RouterInput& input, double jitter, const char* name,
                   std::vector<double>& values, const std::vector<double>& gradient) {
  for (size_t i = 0; i < values.size(); ++i) {
    const double slope = slope_of(values[i], 1e-6, [&] { return objective(input, jitter); });
    ASSERT_NEAR(gradient[i], slope, 1e-8) << name << " at " << i;
  }
}

TEST(RouterBackward, IsThatOfFiniteDifferences) {
  for (const Score score :
       {Score::kSoftmax, Score::kSoftmaxAfterTopK, Score::kSigmoid, Score::kSqrtSoftplus}) {
    for (const double jitter : {0.0, 0.25}) {
      SCOPED_TRACE(testing::Message() << name_of(score) << " jitter " << jitter);
      auto input = make_router_input(loss_config(score), 5);
      input.gate_bias = {0.1, -0.2, 0.3, 0.0};
      input.config.jitter = jitter;
      const RouterRun run(input);
      const RouterOutput output = run.route();
      input.forced_ids = RouterRun::ids(output);
      const auto grads = run.backward(output, some_grad_weights(5, 2));
      expect_slopes(input, jitter, "x", input.x, grads.x);
      expect_slopes(input, jitter, "gate", input.gate, grads.gate);
      expect_slopes(input, jitter, "gate_bias", input.gate_bias, grads.gate_bias);
    }
  }
}

TEST(RouterBackward, AddsToWhatIsThereIfAsked) {
  const auto input = make_router_input(loss_config(), 5);
  const RouterRun run(input);
  const RouterOutput output = run.route();
  const auto grads = run.backward(output, std::vector<double>(10, 0.0));
  std::vector<double> x(15, 0.5);
  std::vector<double> gate(12, 0.25);
  std::vector<double> bias(4, 2.0);
  run.router().backward({.x = run.args.x,
                         .gate = run.args.gate,
                         .output = &output,
                         .grad_x = {x.data(), {5, 3}},
                         .accumulate_x = true,
                         .grad_gate = {gate.data(), {4, 3}},
                         .grad_bias = {bias.data(), {4}},
                         .accumulate_gate = true});
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(x[i], 0.5 + grads.x[i]);
  for (size_t i = 0; i < gate.size(); ++i) EXPECT_EQ(gate[i], 0.25 + grads.gate[i]);
  for (size_t i = 0; i < bias.size(); ++i) EXPECT_EQ(bias[i], 2.0 + grads.gate_bias[i]);
}

TEST(RouterBackward, RefusesOutputsThatOverlapInputs) {
  const auto input = make_router_input(loss_config(), 5);
  const RouterRun run(input);
  const RouterOutput output = run.route();
  std::vector<double> memory(64);
  RouterBackwardArgs args{.x = {memory.data(), {5, 3}}, .gate = run.args.gate, .output = &output};
  const auto expect = [&](const char* words) {
    EXPECT_THAT([&] { run.router().backward(args); },
                testing::ThrowsMessage<Error>(testing::HasSubstr(words)));
  };
  args.grad_x = {memory.data(), {5, 3}};
  expect("grad_x overlaps x");
  args.grad_x = {memory.data() + 15, {5, 3}};
  args.grad_bias = {memory.data() + 29, {4}};
  expect("grad_bias overlaps grad_x");
  args.grad_bias = {};
  args.grad_logits = output.logits.view(DType::kF64, {5, 4});
  expect("grad_logits overlaps logits");
  args.grad_logits = {};
  run.router().backward(args);
}

TEST(RouterJitter, BelongsToTheTokenNotToItsPlace) {
  RouterConfig config = loss_config();
  config.jitter = 0.1;
  const auto all = make_router_input(config, 10);
  const RouterRun run(all);
  RouteArgs args = run.args;
  args.jitter_seed = 7;
  const auto wanted = RouterRun::weights(run.router().route(args));
  args.jitter_seed = 8;
  EXPECT_NE(RouterRun::weights(run.router().route(args)), wanted);
  const RouterRun part(part_of(all, 6, 4));
  args = part.args;
  args.jitter_seed = 7;
  const std::vector<int64_t> ids = {6, 7, 8, 9};
  args.token_ids = {ids.data(), {4}};
  const auto got = RouterRun::weights(part.router().route(args));
  EXPECT_TRUE(std::equal(got.begin(), got.end(), wanted.begin() + 12));
}

TEST(RouterJitter, StaysWithinItsSize) {
  RouterConfig config = loss_config();
  config.jitter = 0.125;
  config.width = 1;
  auto input = make_router_input(config, 500);
  std::fill(input.x.begin(), input.x.end(), 1.0);
  input.gate = {1.0, 0.0, 0.0, 0.0};
  const RouterOutput output = RouterRun(input).route();
  const auto logits = reference::to_values(output.logits.view(DType::kF64, {500, 4}));
  double lowest = 2.0;
  double highest = 0.0;
  double sum = 0.0;
  for (size_t t = 0; t < 500; ++t) {
    lowest = std::min(lowest, logits[t * 4]);
    highest = std::max(highest, logits[t * 4]);
    sum += logits[t * 4];
  }
  EXPECT_GE(lowest, 0.875);
  EXPECT_LT(lowest, 0.88);
  EXPECT_LT(highest, 1.125);
  EXPECT_GT(highest, 1.12);
  EXPECT_NEAR(sum / 500, 1.0, 0.02);
}

TEST(ExpertBias, MovesTowardsTheMeanLoadBySign) {
  std::vector<float> bias = {1, 1, 1, 1};
  const std::vector<int64_t> load = {10, 2, 4, 0};
  update_expert_bias({bias.data(), {4}}, load, {.rate = 0.25});
  EXPECT_THAT(bias, ElementsAre(0.75F, 1.25F, 1.0F, 1.25F));
}

TEST(ExpertBias, TakesTheLoadOfStatistics) {
  std::vector<float> bias = {1, 1};
  const RouterStatistics statistics{
      .num_sequences = 2, .routes_per_expert = {4, 1, 2, 3}, .num_tokens = {5, 5}};
  update_expert_bias({bias.data(), {2}}, statistics, {.rate = 0.25});
  EXPECT_THAT(bias, ElementsAre(0.75F, 1.25F));
}

TEST(ExpertBias, RefusesARateThatIsNotFinite) {
  std::vector<float> bias = {1, 1};
  const std::vector<int64_t> load = {3, 1};
  for (const double rate : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    EXPECT_THROW(update_expert_bias({bias.data(), {2}}, load, {.rate = rate}), Error);
  }
  EXPECT_THAT(bias, ElementsAre(1.0F, 1.0F));
}

TEST(ExpertBias, ComparesTheLargestLoadsExactly) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::vector<float> bias(3, 0.0F);
  const std::vector<int64_t> load = {kMost / 3, kMost / 3, kMost / 3 + 1};
  update_expert_bias({bias.data(), {3}}, load, {.rate = 0.25});
  EXPECT_EQ(bias, (std::vector<float>{0.25F, 0.25F, -0.25F}));  // the mean is kMost / 3 + 1/3
}

TEST(ExpertBias, RefusesLoadsThatCannotBe) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::vector<float> bias(2, 0.0F);
  for (const std::vector<int64_t>& load : {std::vector<int64_t>{kMost, 1}, {-1, 1}, {-kMost, 0}}) {
    EXPECT_THROW(update_expert_bias({bias.data(), {2}}, load, {.rate = 0.25}), Error);
  }
  EXPECT_EQ(bias, std::vector<float>(2, 0.0F));
  const RouterStatistics statistics{
      .num_sequences = 3, .routes_per_expert = {4, 1}, .num_tokens = {5, 5, 5}};
  EXPECT_THROW(static_cast<void>(statistics.load()), Error);
}

// Each count is possible, but no sum of two.
TEST(RouterStatistics, RefusesCountsWhoseSumOverflows) {
  constexpr int64_t kHalf = int64_t{1} << 62;
  RouterStatistics statistics{
      .num_sequences = 2, .routes_per_expert = {kHalf, 1, kHalf, 1}, .num_tokens = {1, 1}};
  std::vector<float> bias(2, 0.0F);
  EXPECT_THROW(update_expert_bias({bias.data(), {2}}, statistics, {.rate = 0.25}), Error);
  const RouterStatistics more = statistics;
  EXPECT_THROW(statistics.add(more), Error);
}

TEST(ExpertBias, KeepsItsMeanWhereCentred) {
  std::vector<double> bias(4, 0.0);
  const std::vector<int64_t> load = {10, 2, 4, 0};
  update_expert_bias({bias.data(), {4}}, load, {.rate = 0.5, .centred = true});
  EXPECT_THAT(bias, ElementsAre(DoubleNear(-0.625, 1e-15), DoubleNear(0.375, 1e-15),
                                DoubleNear(-0.125, 1e-15), DoubleNear(0.375, 1e-15)));
}

}  // namespace
}  // namespace crossdock
