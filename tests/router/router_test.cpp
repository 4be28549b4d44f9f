#include "crossdock/router.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "router/router_case.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

double tolerance(DType dtype) {
  if (dtype == DType::kF64) return 1e-12;
  return dtype == DType::kF32 ? 1e-5 : 1e-2;
}

void expect_close(const char* name, const std::vector<double>& got,
                  const std::vector<double>& wanted, double relative) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  double largest = 1e-3;
  for (const double value : wanted) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - wanted[i]), relative * largest) << name << " at " << i;
  }
}

// Ids, weights, counts, losses and gradients against the reference.
void expect_reference(const reference::RouterInput& input) {
  const RouterRun run(input);
  const RouterOutput output = run.route();
  const reference::RouterResult wanted = reference::route(input);
  const double relative = tolerance(input.config.dtype);
  ASSERT_EQ(RouterRun::ids(output), wanted.expert_ids);
  expect_close("weights", RouterRun::weights(output), wanted.weights, std::min(relative, 1e-5));
  EXPECT_EQ(output.statistics.routes_per_expert, wanted.counts.routes_per_expert);
  EXPECT_EQ(output.statistics.num_tokens, wanted.counts.num_tokens);
  const RouterLosses losses = run.router().losses(output);
  const auto wanted_losses = reference::router_losses(input, wanted, wanted.counts);
  EXPECT_NEAR(losses.aux, wanted_losses.aux, 1e-5 * wanted_losses.aux);
  EXPECT_NEAR(losses.z, wanted_losses.z, 1e-5 * wanted_losses.z);
  const auto grad_weights = some_grad_weights(input.T, input.config.top_k);
  const auto got = run.backward(output, grad_weights, {}, 0.5);
  const auto grads = reference::route_backward(input, wanted, grad_weights, wanted.counts, 0.5);
  expect_close("grad_logits", got.logits, grads.logits, std::min(relative, 1e-5));
  expect_close("grad_x", got.x, grads.x, relative);
  expect_close("grad_gate", got.gate, grads.gate, std::min(relative, 1e-5));
  expect_close("grad_bias", got.gate_bias, grads.gate_bias, std::min(relative, 1e-5));
}

class EveryScore : public ::testing::TestWithParam<std::tuple<Score, DType>> {
 protected:
  RouterConfig config() const {
    return {.num_experts = 12,
            .top_k = 4,
            .width = 10,
            .dtype = std::get<1>(GetParam()),
            .score = std::get<0>(GetParam()),
            .scaling = 2.5,
            .aux_loss_coeff = 0.1,
            .z_loss_coeff = 0.01};
  }
};

TEST_P(EveryScore, MatchesTheReference) {
  expect_reference(make_router_input(config(), 37));
}

TEST_P(EveryScore, MatchesTheReferenceWithBiasesGroupsAndPadding) {
  for (const GroupScore group_score : {GroupScore::kTopShare, GroupScore::kTop2}) {
    RouterConfig limited = config();
    limited.num_groups = 4;
    limited.group_top_k = 2;
    limited.group_score = group_score;
    reference::RouterInput input = make_router_input(limited, 40);
    for (int e = 0; e < 12; ++e) {
      input.gate_bias.push_back(0.125 * (e % 5) - 0.25);
      input.expert_bias.push_back(0.0625 * (e % 7) - 0.125);
    }
    input.mask.assign(40, 0);
    for (const size_t t : {0, 7, 8, 39}) input.mask[t] = 1;
    expect_reference(input);
  }
}

TEST_P(EveryScore, MatchesTheReferenceWithAndWithoutNormalisation) {
  for (const bool normalise : {false, true}) {
    RouterConfig explicit_config = config();
    explicit_config.normalise = normalise;
    expect_reference(make_router_input(explicit_config, 20));
  }
}

TEST_P(EveryScore, MatchesTheReferencePerSequence) {
  RouterConfig per_sequence = config();
  per_sequence.aux_loss_scope = BalanceScope::kSequence;
  reference::RouterInput input = make_router_input(per_sequence, 30);
  input.num_sequences = 4;  // the last one is empty
  for (int t = 0; t < 30; ++t) input.sequence_ids.push_back(t % 7 < 3 ? 0 : 1 + t % 2);
  input.mask.assign(30, 0);
  input.mask[3] = 1;
  expect_reference(input);
}

TEST_P(EveryScore, MatchesTheReferenceForForcedRoutes) {
  reference::RouterInput input = make_router_input(config(), 9);
  for (int64_t t = 0; t < 9; ++t) {
    for (int64_t k = 0; k < 4; ++k) {
      input.forced_ids.push_back(t == 4 || (t + k) % 5 == 0 ? -1 : (t + 3 * k) % 12);
    }
  }
  expect_reference(input);
}

TEST_P(EveryScore, TakesOneExpertAsItsScoreSays) {
  RouterConfig one = config();
  one.top_k = 1;
  expect_reference(make_router_input(one, 11));
}

INSTANTIATE_TEST_SUITE_P(
    All, EveryScore,
    ::testing::Combine(::testing::Values(Score::kSoftmax, Score::kSoftmaxAfterTopK, Score::kSigmoid,
                                         Score::kSqrtSoftplus),
                       ::testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16)),
    [](const auto& info) {
      return std::string(name_of(std::get<0>(info.param))) + "_" +
             std::string(name_of(std::get<1>(info.param)));
    });

// The gate is the identity matrix, so the logits equal x.
reference::RouterInput with_logits(RouterConfig config, const std::vector<double>& logits) {
  config.width = config.num_experts;
  reference::RouterInput input;
  input.config = config;
  input.T = static_cast<int64_t>(logits.size()) / config.num_experts;
  input.x = logits;
  input.gate.assign(static_cast<size_t>(config.num_experts * config.num_experts), 0.0);
  for (int64_t e = 0; e < config.num_experts; ++e) {
    input.gate[static_cast<size_t>(e * config.num_experts + e)] = 1.0;
  }
  return input;
}

TEST(Router, GivesEqualScoresToTheLowerExpert) {
  for (const Score score :
       {Score::kSoftmax, Score::kSoftmaxAfterTopK, Score::kSigmoid, Score::kSqrtSoftplus}) {
    const RouterRun run(with_logits(small_config(score), {1, 1, 1, 1, 0, 2, 0, 2, 3, 5, 5, 5}));
    EXPECT_THAT(RouterRun::ids(run.route()), ElementsAre(0, 1, 1, 3, 1, 2));
  }
}

TEST(Router, GivesEqualGroupsToTheLowerGroup) {
  RouterConfig config = small_config(Score::kSigmoid);
  config.num_groups = 2;
  config.top_k = 1;
  const RouterRun run(with_logits(config, {0, 1, 1, 0}));
  EXPECT_THAT(RouterRun::ids(run.route()), ElementsAre(1));
}

TEST(Router, StaysWithinTheBestGroups) {
  RouterConfig config = small_config(Score::kSigmoid);
  config.num_groups = 2;
  config.group_top_k = 1;
  // The best expert is in group 0, the best pair in group 1.
  const RouterRun run(with_logits(config, {3, -9, 2, 2}));
  EXPECT_THAT(RouterRun::ids(run.route()), ElementsAre(2, 3));
}

TEST(Router, ScoresGroupsByTheirBestTwoForAnyNumberOfGroups) {
  RouterConfig config{.num_experts = 12, .top_k = 4, .width = 5, .dtype = DType::kF64};
  config.num_groups = 6;
  config.group_top_k = 3;  // does not divide top_k
  config.group_score = GroupScore::kTop2;
  expect_reference(make_router_input(config, 25));
}

TEST(Router, UsesTheExpertBiasForTheChoiceAlone) {
  auto input = with_logits(small_config(Score::kSigmoid), {2, 1, 0, -1});
  input.expert_bias = {0, 0, 0, 5};
  const RouterRun run(input);
  const RouterOutput output = run.route();
  EXPECT_THAT(RouterRun::ids(output), ElementsAre(3, 0));
  const double a = 1 / (1 + std::exp(1.0));
  const double b = 1 / (1 + std::exp(-2.0));
  EXPECT_THAT(RouterRun::weights(output), ElementsAre(testing::DoubleNear(a / (a + b), 1e-15),
                                                      testing::DoubleNear(b / (a + b), 1e-15)));
}

TEST(Router, SoftmaxAfterTheChoiceIsTheNormalisedSoftmax) {
  RouterConfig before = small_config();
  before.normalise = true;
  const auto input = make_router_input(before, 20);
  auto after = input;
  after.config.score = Score::kSoftmaxAfterTopK;
  after.config.normalise = {};
  const auto a = RouterRun::weights(RouterRun(input).route());
  const auto b = RouterRun::weights(RouterRun(after).route());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-14);
}

TEST(Router, ChoosesWhatIsNotANumberLast) {
  const double nan = std::nan("");
  RouterConfig config = small_config(Score::kSigmoid);
  config.top_k = 3;
  const RouterRun run(with_logits(config, {0, 0, 0, 0}));
  std::vector<double> bias = {nan, 1, nan, 2};
  RouteArgs args = run.args;
  args.expert_bias = {bias.data(), {4}};
  EXPECT_THAT(RouterRun::ids(run.router().route(args)), ElementsAre(3, 1, 0));
}

TEST(Router, WorksWithoutTokens) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    RouterConfig config = small_config();
    config.dtype = dtype;
    config.aux_loss_coeff = 1.0;
    config.z_loss_coeff = 1.0;
    const RouterRun run(make_router_input(config, 0));
    const RouterOutput output = run.route();
    EXPECT_EQ(output.routing().expert_ids.shape, (Shape{0, 2}));
    EXPECT_THAT(output.statistics.load(), testing::Each(0));
    EXPECT_EQ(run.router().losses(output).aux, 0.0);
    EXPECT_EQ(run.router().losses(output).z, 0.0);
    const auto grads = run.backward(output, {});
    EXPECT_THAT(grads.gate, testing::Each(0.0));
    EXPECT_THAT(grads.gate_bias, testing::Each(0.0));
  }
}

TEST(Router, PaddingCountsNowhereWhateverItHolds) {
  RouterConfig config = small_config();
  config.aux_loss_coeff = 0.5;
  config.z_loss_coeff = 0.5;
  const auto plain = make_router_input(config, 6);
  auto padded = plain;
  padded.T = 8;
  padded.mask = {0, 1, 0, 0, 0, 0, 0, 1};
  padded.x.insert(padded.x.begin() + 4, 4, std::nan(""));
  padded.x.insert(padded.x.end(), 4, std::nan(""));
  const RouterRun a(plain);
  const RouterRun b(padded);
  const RouterOutput out_a = a.route();
  const RouterOutput out_b = b.route();
  EXPECT_THAT(std::vector<int64_t>(RouterRun::ids(out_b)), testing::Contains(-1).Times(4));
  EXPECT_EQ(out_b.statistics.routes_per_expert, out_a.statistics.routes_per_expert);
  EXPECT_EQ(out_b.statistics.num_tokens, out_a.statistics.num_tokens);
  EXPECT_EQ(b.router().losses(out_b).aux, a.router().losses(out_a).aux);
  EXPECT_EQ(b.router().losses(out_b).z, a.router().losses(out_a).z);
  auto grad_weights = some_grad_weights(6, 2);
  const auto grads_a = a.backward(out_a, grad_weights);
  grad_weights.insert(grad_weights.begin() + 2, 2, 1.0);
  grad_weights.insert(grad_weights.end(), 2, 1.0);
  const auto grads_b = b.backward(out_b, grad_weights);
  EXPECT_EQ(grads_a.gate, grads_b.gate);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(grads_b.x[4 + i], 0.0);
    EXPECT_EQ(grads_b.x[28 + i], 0.0);
  }
}

TEST(Router, HasNoLossWithoutAValidToken) {
  RouterConfig config = small_config();
  config.aux_loss_coeff = 1.0;
  config.z_loss_coeff = 1.0;
  auto input = make_router_input(config, 3);
  input.mask = {1, 1, 1};
  const RouterRun run(input);
  const RouterOutput output = run.route();
  EXPECT_EQ(run.router().losses(output).aux, 0.0);
  EXPECT_EQ(run.router().losses(output).z, 0.0);
  EXPECT_THAT(run.backward(output, some_grad_weights(3, 2)).x, testing::Each(0.0));
}

TEST(Router, ReplaysRecordedRoutes) {
  const auto input = make_router_input(small_config(Score::kSigmoid), 10);
  const RouterRun run(input);
  const RouterOutput first = run.route();
  RouteArgs args = run.args;
  args.forced_ids = first.routing().expert_ids;
  std::vector<double> bias = {9, 0, 0, 0};
  args.expert_bias = {bias.data(), {4}};
  const RouterOutput again = run.router().route(args);
  EXPECT_EQ(RouterRun::ids(again), RouterRun::ids(first));
  EXPECT_EQ(RouterRun::weights(again), RouterRun::weights(first));
}

TEST(Router, ForcesBalance) {
  RouterConfig config = small_config();
  config.force_balance = true;
  const RouterOutput output = RouterRun(make_router_input(config, 6)).route();
  EXPECT_THAT(RouterRun::ids(output), ElementsAre(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3));
  EXPECT_THAT(output.statistics.load(), testing::Each(3));
}

TEST(Router, GivesATokenTheSameBitsInAnyCompanyOnAnyNumberOfThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    RouterConfig config{.num_experts = 40, .top_k = 6, .width = 300, .dtype = dtype};
    const auto all = make_router_input(config, 300);
    const RouterRun run(all, std::make_shared<ThreadPool>(3));
    const RouterOutput whole = run.route();
    const auto grads = run.backward(whole, some_grad_weights(300, 6));
    const RouterRun single(all, std::make_shared<ThreadPool>(1));
    const RouterOutput alone = single.route();
    EXPECT_EQ(RouterRun::weights(alone), RouterRun::weights(whole));
    EXPECT_EQ(single.backward(alone, some_grad_weights(300, 6)).gate, grads.gate);
    for (const int64_t first : {0, 17, 290}) {
      auto part = all;
      part.T = 10;
      part.x.assign(all.x.begin() + first * 300, all.x.begin() + (first + 10) * 300);
      const auto got = RouterRun::weights(RouterRun(part).route());
      const auto wanted = RouterRun::weights(whole);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), wanted.begin() + first * 6));
    }
  }
}

template <typename Output>
concept ShowsRouting = requires(Output&& output) {
  std::forward<Output>(output).routing();
};

TEST(Router, GivesNoRoutingOutOfATemporaryOutput) {
  static_assert(ShowsRouting<const RouterOutput&> && !ShowsRouting<RouterOutput>);
}

TEST(Router, SumsStatisticsWithoutChangingThem) {
  const RouterRun run(make_router_input(small_config(), 9));
  const RouterStatistics own = run.route().statistics;
  const RouterStatistics sum = run.router().sum(own, own);
  RouterStatistics wanted = own;
  wanted.add(own);
  EXPECT_EQ(sum.routes_per_expert, wanted.routes_per_expert);
  EXPECT_EQ(sum.num_tokens, (std::vector<int64_t>{18}));
  EXPECT_EQ(own.on_host().num_tokens, (std::vector<int64_t>{9}));  // already on the host
  const RouterStatistics other{.num_sequences = 1, .routes_per_expert = {1, 2}, .num_tokens = {3}};
  EXPECT_THAT(message_of([&] { (void)run.router().sum(own, other); }),
              HasSubstr("must have the same sequences and 4 experts"));
}

TEST(Router, DoesNotLookAtForcedRoutesOfPadding) {
  auto input = make_router_input(small_config(), 2);
  input.forced_ids = {3, 1, 99, 99};
  input.mask = {0, 1};
  EXPECT_THAT(RouterRun::ids(RouterRun(input).route()), ElementsAre(3, 1, -1, -1));
}

}  // namespace
}  // namespace crossdock
