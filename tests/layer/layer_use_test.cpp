// The ways a training loop uses the layer: several in flight, delayed gradients, recomputation.
#include <gtest/gtest.h>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

OwnedTensor delayed_backward(LayerOnRank& rank, MoeSaved& saved) {
  MoeBackwardArgs args = rank.backward_args(saved);
  args.delay_dw = true;
  return rank.layer.backward(args);
}

OwnedTensor accumulate(LayerOnRank& rank, MoeSaved& saved) {
  MoeBackwardArgs args = rank.backward_args(saved);
  args.accumulate = true;
  return rank.layer.backward(args);
}

// Runs `body(group, wanted)` on 4 ranks with every strategy; `wanted` is the rank's reference.
void on_every_strategy(
    LayerCase layer_case,
    const std::function<void(Group&, const LayerCase&, const RankResult&)>& body) {
  const std::vector<RankResult> wanted = run_reference(layer_case);
  for (const std::string& strategy : strategy_names()) {
    SCOPED_TRACE(strategy);
    layer_case.config.strategy = strategy;
    run_ranks(layer_case.num_ranks(), [&](Group& group) {
      body(group, layer_case, wanted[static_cast<size_t>(group.rank())]);
    });
  }
}

LayerCase masked_case() {
  return make_case(list_layer_cases(4)[2].options);
}

TEST(MoeLayerUse, SeveralForwardsOfSeveralWidthsMayWaitForTheirBackward) {
  LayerCaseOptions wide = list_layer_cases(4)[1].options;
  wide.config.router.width = 24;
  const LayerCase second_case = make_case(wide);
  const std::vector<RankResult> second_wanted = run_reference(second_case);
  on_every_strategy(
      masked_case(), [&](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
        LayerCase other_case = second_case;
        other_case.config.strategy = layer_case.config.strategy;
        LayerOnRank a(group, layer_case);
        LayerOnRank b(group, other_case);
        MoeForwardResult f0 = a.forward();
        MoeForwardResult f1 = b.forward();
        const OwnedTensor g0 = a.backward(f0.saved);
        const RankResult r0 = a.result(f0, g0);
        MoeForwardResult f2 = a.forward();
        const OwnedTensor g1 = b.backward(f1.saved);
        const OwnedTensor g2 = a.backward(f2.saved);
        EXPECT_EQ(find_difference(r0, wanted, 1e-11), "");
        EXPECT_EQ(find_difference(a.result(f2, g2), wanted, 1e-11), "");
        EXPECT_EQ(find_difference(b.result(f1, g1),
                                  second_wanted[static_cast<size_t>(group.rank())], 1e-11),
                  "");
      });
}

TEST(MoeLayerUse, DelayedWeightGradientsAreTheSame) {
  on_every_strategy(masked_case(), [](Group& group, const LayerCase& layer_case,
                                      const RankResult& wanted) {
    LayerOnRank rank(group, layer_case, {}, -5.0);
    MoeForwardResult first = rank.forward();
    MoeForwardResult second = rank.forward();
    const OwnedTensor grad_x = delayed_backward(rank, first.saved);
    const std::vector<double> untouched = reference::to_values(rank.parameters.grads().experts.w1);
    EXPECT_TRUE(
        std::all_of(untouched.begin(), untouched.end(), [](double v) { return v == -5.0; }));
    delayed_backward(rank, second.saved);
    rank.layer.backward_dw({.x = rank.tokens.x.view,
                            .grad_out = rank.tokens.grad_out.view,
                            .saved = &first.saved,
                            .experts = rank.parameters.grads().experts,
                            .shared = rank.parameters.grads().shared});
    EXPECT_EQ(find_difference(rank.result(first, grad_x), wanted, 1e-11), "");
  });
}

TEST(MoeLayerUse, EachGradientMayBeAskedForAlone) {
  using Member = TensorView ExpertGradients::*;
  on_every_strategy(masked_case(),
                    [](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
                      LayerOnRank rank(group, layer_case, {}, -5.0);
                      for (const Member member : {&ExpertGradients::w1, &ExpertGradients::w2,
                                                  &ExpertGradients::b1, &ExpertGradients::b2}) {
                        MoeLayerGradients one;
                        one.experts.*member = rank.parameters.grads().experts.*member;
                        one.shared.*member = rank.parameters.grads().shared.*member;
                        MoeForwardResult result = rank.forward();
                        MoeBackwardArgs args = rank.backward_args(result.saved);
                        args.grads = one;
                        rank.layer.backward(args);
                      }
                      MoeForwardResult result = rank.forward();  // for gate, out and grad_x
                      MoeBackwardArgs args = rank.backward_args(result.saved);
                      args.grads.experts = {};
                      args.grads.shared = {};
                      const OwnedTensor grad_x = rank.layer.backward(args);
                      EXPECT_EQ(find_difference(rank.result(result, grad_x), wanted, 1e-11), "");
                    });
}

TEST(MoeLayerUse, GradientsAccumulate) {
  on_every_strategy(masked_case(),
                    [](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
                      LayerOnRank rank(group, layer_case);
                      MoeForwardResult first = rank.forward();
                      MoeForwardResult second = rank.forward();
                      accumulate(rank, first.saved);
                      const OwnedTensor grad_x = accumulate(rank, second.saved);
                      RankResult doubled = wanted;
                      const auto twice = [](std::vector<double>& values) {
                        for (double& value : values) value *= 2.0;
                      };
                      twice(doubled.grad_gate);
                      twice(doubled.grad_gate_bias);
                      doubled.experts.push_back(doubled.shared);
                      for (reference::MlpWeights& expert : doubled.experts) {
                        twice(expert.w1);
                        twice(expert.w2);
                        twice(expert.b1);
                        twice(expert.b2);
                      }
                      doubled.shared = doubled.experts.back();
                      doubled.experts.pop_back();
                      EXPECT_EQ(find_difference(rank.result(second, grad_x), doubled, 1e-11), "");
                    });
}

TEST(MoeLayerUse, RecomputationFromASavedDecisionNeedsNoNewPlan) {
  on_every_strategy(masked_case(),
                    [](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
                      LayerOnRank rank(group, layer_case);
                      MoeDecision kept;
                      std::vector<double> out;
                      {
                        const MoeForwardResult first = rank.forward();
                        kept = first.saved.decision;
                        out = reference::to_values(first.out.view);
                      }
                      MoeForwardArgs args = rank.forward_args();
                      args.decision = &kept;
                      MoeForwardResult again = rank.layer.forward(args);
                      EXPECT_EQ(again.saved.decision.plan.id(), kept.plan.id());
                      EXPECT_EQ(reference::to_values(again.out.view), out);
                      const OwnedTensor grad_x = rank.backward(again.saved);
                      EXPECT_EQ(find_difference(rank.result(again, grad_x), wanted, 1e-11), "");
                    });
}

TEST(MoeLayerUse, WritesIntoTheCallersMemory) {
  on_every_strategy(
      masked_case(), [](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
        LayerOnRank rank(group, layer_case);
        const OwnedTensor out = group.pool().take(DType::kF64, rank.tokens.x.view.shape);
        const OwnedTensor grad_x = group.pool().take(DType::kF64, rank.tokens.x.view.shape);
        MoeForwardArgs forward_args = rank.forward_args();
        forward_args.out = out.view;
        MoeForwardResult forward = rank.layer.forward(forward_args);
        EXPECT_EQ(forward.out.view.data, out.view.data);
        MoeBackwardArgs backward_args = rank.backward_args(forward.saved);
        backward_args.grad_x = grad_x.view;
        rank.layer.backward(backward_args);
        EXPECT_EQ(find_difference(rank.result(forward, grad_x), wanted, 1e-11), "");
      });
}

TEST(MoeLayerUse, RecordsItsSteps) {
  const LayerCase layer_case = masked_case();
  run_ranks(layer_case.num_ranks(), [&](Group& group) {
    run_layer(group, layer_case);
    std::vector<std::string> seen;
    for (const Event& event : group.recorder().events()) {
      EXPECT_GT(event.end_ns, 0) << event.operation;
      seen.emplace_back(event.operation);
    }
    for (const char* step :
         {"router", "plan", "dispatch", "shared_experts", "experts", "combine", "experts_dx",
          "dispatch_backward", "collect_routes", "router_backward", "experts_dw"}) {
      EXPECT_NE(std::find(seen.begin(), seen.end(), step), seen.end()) << step;
    }
  });
}

}  // namespace
}  // namespace crossdock
