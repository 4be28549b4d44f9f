// BalanceScope::kGlobalBatch: the routes of a step's earlier micro-batches also count.
#include <gtest/gtest.h>

#include <algorithm>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

constexpr int kRanks = 4;

LayerCase balanced_case(BalanceScope scope = BalanceScope::kGlobalBatch) {
  LayerCaseOptions options = list_layer_cases(2)[0].options;
  options.config.router.aux_loss_coeff = 0.7;
  options.config.router.z_loss_coeff = 0.3;
  options.config.router.aux_loss_scope = scope;
  options.tokens_per_rank = {6, 3, 0, 9};
  options.mask = true;
  return make_case(options);
}

// Three micro-batches with the parameters of `first` and its tokens, spread differently over ranks.
std::vector<LayerCase> micro_batches(const LayerCase& first) {
  std::vector<LayerCase> cases = {first, spread(first, {2, 7, 4, 5}), spread(first, {0, 1, 17, 0})};
  const int64_t D = first.config.router.width;
  std::rotate(cases[1].x.begin(), cases[1].x.begin() + 5 * D, cases[1].x.end());
  std::rotate(cases[2].x.begin(), cases[2].x.begin() + 11 * D, cases[2].x.end());
  return cases;
}

// The counts for the losses of the last of `cases` on `ranks`.
reference::RouterCounts counts_of(std::span<const LayerCase> cases, const std::vector<int>& ranks) {
  std::vector<std::vector<reference::RouterCounts>> counts;
  for (const LayerCase& layer_case : cases) {
    counts.emplace_back();
    for (const int rank : ranks) {
      counts.back().push_back(reference::route(router_input(layer_case, rank)).counts);
    }
  }
  return reference::global_batch_counts(counts);
}

// A rank's loss gradients: the difference between `grad_losses` = 1 and `grad_losses` = 0.
struct LossGradients {
  std::vector<double> x;
  std::vector<double> gate;
};

LossGradients loss_gradients(MoeLayer& layer, const LayerCase& layer_case, const Group& group,
                             const RankTokens& tokens, MoeForwardArgs args) {
  LossGradients result;
  for (const double grad_losses : {0.0, 1.0}) {
    const RankParameters parameters(layer_case, group, 0.0);
    args.weights = parameters.weights();
    MoeForwardResult forward = layer.forward(args);
    const OwnedTensor grad_x = layer.backward({.weights = parameters.weights(),
                                               .x = tokens.x.view,
                                               .grad_out = tokens.grad_out.view,
                                               .saved = &forward.saved,
                                               .grads = parameters.grads(),
                                               .grad_losses = grad_losses});
    LossGradients now{reference::to_values(grad_x.view),
                      reference::to_values(parameters.grads().gate)};
    if (grad_losses == 0.0) {
      result = std::move(now);
      continue;
    }
    for (size_t i = 0; i < now.x.size(); ++i) result.x[i] = now.x[i] - result.x[i];
    for (size_t i = 0; i < now.gate.size(); ++i) result.gate[i] = now.gate[i] - result.gate[i];
  }
  return result;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], 1e-12) << i;
}

// A step of three micro-batches on one rank of `group`, counted over `counted` (ranks of `world`).
void expect_step(Group& world, Group& group, Group* counting_group,
                 const std::vector<int>& counted) {
  const std::vector<LayerCase> cases = micro_batches(balanced_case());
  MoeLayer layer(group, cases[0].config, {.counting_group = counting_group});
  const RankParameters parameters(cases[0], group, 0.0);
  MoeDecision earlier;
  for (size_t m = 0; m < cases.size(); ++m) {
    SCOPED_TRACE(testing::Message() << "rank " << world.rank() << " micro-batch " << m);
    const RankTokens tokens(cases[m], world.rank());
    const MoeForwardArgs args{.weights = parameters.weights(),
                              .x = tokens.x.view,
                              .mask = tokens.mask.view,
                              .earlier = m == 0 ? nullptr : &earlier.statistics};
    const MoeDecision decision = layer.forward(args).saved.decision;
    const reference::RouterInput input = router_input(cases[m], world.rank());
    const reference::RouterResult routes = reference::route(input);
    const reference::RouterCounts counts = counts_of(std::span(cases).first(m + 1), counted);
    EXPECT_EQ(decision.statistics.routes_per_expert, counts.routes_per_expert);
    EXPECT_EQ(decision.statistics.num_tokens, counts.num_tokens);
    EXPECT_EQ(decision.total_tokens, counts.total_tokens);
    const reference::RouterLossValues wanted = reference::router_losses(input, routes, counts);
    EXPECT_NEAR(decision.losses.aux, wanted.aux, 1e-13);
    EXPECT_NEAR(decision.losses.z, wanted.z, 1e-13);

    const LossGradients got = loss_gradients(layer, cases[m], group, tokens, args);
    const reference::RouterGradients grads = reference::route_backward(
        input, routes, std::vector<double>(routes.weights.size(), 0.0), counts);
    expect_near(got.x, grads.x);
    expect_near(got.gate, grads.gate);
    earlier = decision;
  }
}

TEST(GlobalBatch, CountsTheRoutesOfEarlierMicroBatchesOverTheGroup) {
  run_ranks(kRanks, [](Group& world) { expect_step(world, world, nullptr, {0, 1, 2, 3}); });
}

TEST(GlobalBatch, CountsThemOverTheGroupThatIsStated) {
  run_ranks(kRanks, [](Group& world) {
    const int first = world.rank() / 2 * 2;
    const std::vector<int> ranks = {first, first + 1};
    const std::unique_ptr<Group> pair = world.subgroup(ranks);
    expect_step(world, world, pair.get(), ranks);
    expect_step(world, *pair, &world, {0, 1, 2, 3});
  });
}

// One micro-batch of a global batch is the batch itself.
TEST(GlobalBatch, OfOneMicroBatchIsABatch) {
  const LayerCase global = balanced_case();
  const LayerCase batch = balanced_case(BalanceScope::kBatch);
  const std::vector<RankResult> got = run_layer_on_threads(global);
  const std::vector<RankResult> wanted = run_layer_on_threads(batch);
  for (size_t r = 0; r < got.size(); ++r) EXPECT_EQ(find_difference(got[r], wanted[r], 0.0), "");
}

// Runs two forwards, the second with the statistics that `earlier_of` derives from the first
// decision; every rank must refuse it with `words`.
void expect_refusal(
    BalanceScope scope, const std::string& words,
    const std::function<const RouterStatistics*(Group&, MoeDecision&)>& earlier_of) {
  const LayerCase layer_case = balanced_case(scope);
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    MoeForwardArgs args = rank.forward_args();
    MoeDecision first = rank.layer.forward(args).saved.decision;
    args.earlier = earlier_of(group, first);
    expect_refused(group, words, [&] { (void)rank.layer.forward(args); });
    (void)rank.forward();
  });
}

TEST(GlobalBatch, EarlierCountsMustBeIdenticalOnEveryRank) {
  expect_refusal(BalanceScope::kGlobalBatch, "rank 1 has earlier_tokens=0 where rank 0 has",
                 [](Group& group, MoeDecision& first) {
                   return group.rank() == 1 ? nullptr : &first.statistics;
                 });
}

TEST(GlobalBatch, EarlierCountsMustFitTheLayer) {
  expect_refusal(BalanceScope::kGlobalBatch,
                 "earlier must be the statistics of an earlier micro-batch",
                 [](Group& group, MoeDecision& first) {
                   if (group.rank() == 1) first.statistics.routes_per_expert.pop_back();
                   return &first.statistics;
                 });
}

TEST(GlobalBatch, EarlierCountsMustBeWhereTheTokensAre) {
  int64_t somewhere = 0;
  const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
  expect_refusal(BalanceScope::kGlobalBatch, "earlier must be where the tokens are, in host memory",
                 [&](Group& group, MoeDecision& first) {
                   if (group.rank() == 1) {
                     first.statistics.device_counts.view =
                         TensorView(&somewhere, DType::kI64, {1}, gpu);
                   }
                   return &first.statistics;
                 });
}

TEST(GlobalBatch, OtherLossesTakeNoEarlierCounts) {
  expect_refusal(BalanceScope::kBatch, "earlier is for BalanceScope::kGlobalBatch",
                 [](Group&, MoeDecision& first) { return &first.statistics; });
}

}  // namespace
}  // namespace crossdock
