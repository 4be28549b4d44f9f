// Several auxiliary losses at once in a layer: each is the same as on its own.
#include <gtest/gtest.h>

#include <array>
#include <optional>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

constexpr int kRanks = 4;
constexpr std::array kScopes = {BalanceScope::kBatch, BalanceScope::kSequence,
                                BalanceScope::kGlobalBatch};

LayerCase plain_case() {
  LayerCaseOptions options = list_layer_cases(kRanks)[0].options;
  options.config.router.z_loss_coeff = 0.3;
  options.tokens_per_rank = {6, 3, 0, 9};
  return make_case(options);
}

LayerCase with_all_losses(LayerCase layer_case) {
  layer_case.config.router.aux_loss_coeffs = {.batch = 0.7, .sequence = 0.2, .global_batch = 0.05};
  return layer_case;
}

LayerCase with_one_loss(LayerCase layer_case, BalanceScope scope) {
  const LayerCase all = with_all_losses(layer_case);
  layer_case.config.router.aux_loss_coeff = all.config.router.aux_coeff(scope);
  layer_case.config.router.aux_loss_scope = scope;
  return layer_case;
}

struct Step {
  RouterLosses losses;            // of the second micro-batch
  std::vector<double> grad_gate;  // of the second micro-batch
};

// Two micro-batches of the same tokens on one rank; two sequences, which pairs of ranks share.
Step run_step(Group& group, const LayerCase& layer_case, Group* sequence_group,
              Group* counting_group) {
  LayerOnRank rank(group, layer_case,
                   {.counting_group = counting_group, .sequence_group = sequence_group});
  const int64_t T = rank.tokens.x.view.num_rows();
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < T; ++t) ids.push_back(t % 2 == 0 ? 1 : 0);
  MoeForwardArgs args = rank.forward_args();
  args.sequence_ids = ConstTensorView(ids.data(), {T});
  args.num_sequences = 2;
  const MoeDecision first = rank.layer.forward(args).saved.decision;
  const bool is_global = layer_case.config.router.counts(BalanceScope::kGlobalBatch);
  if (is_global) args.earlier = &first.statistics;
  MoeForwardResult second = rank.layer.forward(args);
  if (is_global) {
    const int64_t tokens = second.saved.decision.statistics.num_tokens[0];
    EXPECT_EQ(tokens, 2 * second.saved.decision.total_tokens);
  }
  rank.backward(second.saved);
  return {second.saved.decision.losses, reference::to_values(rank.parameters.grads().gate)};
}

TEST(SeveralLossesOfALayer, AreThoseOfEachAlone) {
  const LayerCase plain = plain_case();
  for (const bool states_groups : {false, true}) {
    run_ranks(kRanks, [&](Group& group) {
      const int first = group.rank() / 2 * 2;
      const std::unique_ptr<Group> pair = group.subgroup(std::vector<int>{first, first + 1});
      const std::unique_ptr<Group> all = group.subgroup(std::vector<int>{0, 1, 2, 3});
      Group* sequences = states_groups ? pair.get() : nullptr;
      Group* counting = states_groups ? all.get() : nullptr;
      const Step got = run_step(group, with_all_losses(plain), sequences, counting);
      const Step none = run_step(group, plain, sequences, counting);
      std::vector<double> grads = none.grad_gate;
      for (const BalanceScope scope : kScopes) {
        const Step alone = run_step(group, with_one_loss(plain, scope), sequences, counting);
        EXPECT_EQ(got.losses.aux_terms.of(scope), alone.losses.aux);
        EXPECT_EQ(got.losses.z, alone.losses.z);
        for (size_t i = 0; i < grads.size(); ++i)
          grads[i] += alone.grad_gate[i] - none.grad_gate[i];
      }
      for (size_t i = 0; i < grads.size(); ++i) ASSERT_NEAR(got.grad_gate[i], grads[i], 1e-12);
    });
  }
}

}  // namespace
}  // namespace crossdock
