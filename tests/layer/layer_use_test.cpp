// The ways a training loop uses the layer: several in flight, delayed gradients, recomputation.
#include <gtest/gtest.h>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

// A layer of one rank with its tokens and parameters, step by step.
struct Stage {
  const LayerCase& layer_case;
  MoeLayer layer;
  RankParameters parameters;
  RankTokens tokens;

  Stage(Group& group, const LayerCase& layer_case_in, double initial_gradient = 0.0)
      : layer_case(layer_case_in),
        layer(group, layer_case.config),
        parameters(layer_case, group, initial_gradient),
        tokens(layer_case, group.rank()) {}

  MoeForwardResult forward(const MoeDecision* decision = nullptr) {
    return layer.forward({.weights = parameters.weights(),
                          .x = tokens.x.view,
                          .mask = tokens.mask.view,
                          .decision = decision});
  }

  OwnedTensor backward(MoeSaved& saved, bool accumulate = false, bool delay_dw = false) {
    return layer.backward({.weights = parameters.weights(),
                           .x = tokens.x.view,
                           .grad_out = tokens.grad_out.view,
                           .saved = &saved,
                           .grads = parameters.grads(),
                           .accumulate = accumulate,
                           .delay_dw = delay_dw});
  }

  RankResult result(const MoeForwardResult& forward_result, const OwnedTensor& grad_x) const {
    RankResult result;
    result.out = reference::to_values(forward_result.out.view);
    result.grad_x = reference::to_values(grad_x.view);
    result.losses = forward_result.saved.decision.losses;
    result.load = forward_result.saved.decision.load;
    parameters.read_gradients(layer_case, result);
    return result;
  }
};

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
        Stage a(group, layer_case);
        Stage b(group, other_case);
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
    Stage stage(group, layer_case, -5.0);
    MoeForwardResult first = stage.forward();
    MoeForwardResult second = stage.forward();
    const OwnedTensor grad_x = stage.backward(first.saved, false, true);
    const std::vector<double> untouched = reference::to_values(stage.parameters.grads().experts.w1);
    EXPECT_TRUE(
        std::all_of(untouched.begin(), untouched.end(), [](double v) { return v == -5.0; }));
    stage.backward(second.saved, false, true);
    stage.layer.backward_dw({.x = stage.tokens.x.view,
                             .grad_out = stage.tokens.grad_out.view,
                             .saved = &first.saved,
                             .experts = stage.parameters.grads().experts,
                             .shared = stage.parameters.grads().shared});
    EXPECT_EQ(find_difference(stage.result(first, grad_x), wanted, 1e-11), "");
  });
}

TEST(MoeLayerUse, EachGradientMayBeAskedForAlone) {
  using Member = TensorView ExpertGradients::*;
  on_every_strategy(
      masked_case(), [](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
        Stage stage(group, layer_case, -5.0);
        for (const Member member : {&ExpertGradients::w1, &ExpertGradients::w2,
                                    &ExpertGradients::b1, &ExpertGradients::b2}) {
          MoeLayerGradients one;
          one.experts.*member = stage.parameters.grads().experts.*member;
          one.shared.*member = stage.parameters.grads().shared.*member;
          MoeForwardResult result = stage.forward();
          stage.layer.backward({.weights = stage.parameters.weights(),
                                .x = stage.tokens.x.view,
                                .grad_out = stage.tokens.grad_out.view,
                                .saved = &result.saved,
                                .grads = one});
        }
        MoeForwardResult result = stage.forward();  // the gate's, and out and grad_x
        const OwnedTensor grad_x =
            stage.layer.backward({.weights = stage.parameters.weights(),
                                  .x = stage.tokens.x.view,
                                  .grad_out = stage.tokens.grad_out.view,
                                  .saved = &result.saved,
                                  .grads = {.gate = stage.parameters.grads().gate,
                                            .gate_bias = stage.parameters.grads().gate_bias}});
        EXPECT_EQ(find_difference(stage.result(result, grad_x), wanted, 1e-11), "");
      });
}

TEST(MoeLayerUse, GradientsAccumulate) {
  on_every_strategy(masked_case(),
                    [](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
                      Stage stage(group, layer_case);
                      MoeForwardResult first = stage.forward();
                      MoeForwardResult second = stage.forward();
                      stage.backward(first.saved, true);
                      const OwnedTensor grad_x = stage.backward(second.saved, true);
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
                      EXPECT_EQ(find_difference(stage.result(second, grad_x), doubled, 1e-11), "");
                    });
}

TEST(MoeLayerUse, RecomputationFromASavedDecisionNeedsNoNewPlan) {
  on_every_strategy(masked_case(),
                    [](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
                      Stage stage(group, layer_case);
                      MoeDecision kept;
                      std::vector<double> out;
                      {
                        const MoeForwardResult first = stage.forward();
                        kept = first.saved.decision;
                        out = reference::to_values(first.out.view);
                      }
                      MoeForwardResult again = stage.forward(&kept);
                      EXPECT_EQ(again.saved.decision.plan.id(), kept.plan.id());
                      EXPECT_EQ(reference::to_values(again.out.view), out);
                      const OwnedTensor grad_x = stage.backward(again.saved);
                      EXPECT_EQ(find_difference(stage.result(again, grad_x), wanted, 1e-11), "");
                    });
}

TEST(MoeLayerUse, WritesIntoTheCallersMemory) {
  on_every_strategy(
      masked_case(), [](Group& group, const LayerCase& layer_case, const RankResult& wanted) {
        Stage stage(group, layer_case);
        const OwnedTensor out = group.pool().take(DType::kF64, stage.tokens.x.view.shape);
        const OwnedTensor grad_x = group.pool().take(DType::kF64, stage.tokens.x.view.shape);
        MoeForwardResult forward = stage.layer.forward({.weights = stage.parameters.weights(),
                                                        .x = stage.tokens.x.view,
                                                        .out = out.view,
                                                        .mask = stage.tokens.mask.view});
        EXPECT_EQ(forward.out.view.data, out.view.data);
        stage.layer.backward({.weights = stage.parameters.weights(),
                              .x = stage.tokens.x.view,
                              .grad_out = stage.tokens.grad_out.view,
                              .saved = &forward.saved,
                              .grads = stage.parameters.grads(),
                              .grad_x = grad_x.view});
        EXPECT_EQ(find_difference(stage.result(forward, grad_x), wanted, 1e-11), "");
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
