// A refusal by one rank is the same error on all, and the group stays usable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <new>

#include "crossdock/extend/forwarding_strategy.hpp"
#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kCulprit = 1;

// Runs `call` on all ranks; it must throw an Error with these words everywhere. Then the group must
// still carry a whole layer.
void expect_refusal(const std::string& words,
                    const std::function<void(Group&, const LayerCase&)>& call) {
  const LayerCase layer_case = make_case(list_layer_cases(kRanks)[0].options);
  const std::vector<RankResult> wanted = run_reference(layer_case);
  run_ranks(kRanks, [&](Group& group) {
    expect_refused(group, words, [&] { call(group, layer_case); });
    EXPECT_EQ(find_difference(run_layer(group, layer_case),
                              wanted[static_cast<size_t>(group.rank())], 1e-11),
              "");
  });
}

TEST(MoeLayerRefusal, TokensOfTheWrongWidth) {
  expect_refusal(
      "x must be [6, 8] fp64, got [6, 7] fp64", [](Group& group, const LayerCase& layer_case) {
        LayerOnRank rank(group, layer_case);
        const OwnedTensor x = group.pool().take(DType::kF64, {6, group.rank() == kCulprit ? 7 : 8});
        std::fill_n(static_cast<double*>(x.view.data), x.view.num_elements(), 1.0);
        (void)rank.layer.forward({.weights = rank.parameters.weights(), .x = x.view});
      });
}

TEST(MoeLayerRefusal, ExpertsOfTheWrongShape) {
  expect_refusal("w2 must be [2, 8, 5] fp64, got nothing",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   MoeForwardArgs args = rank.forward_args();
                   if (group.rank() == kCulprit) args.weights.experts.w2 = {};
                   (void)rank.layer.forward(args);
                 });
}

TEST(MoeLayerRefusal, EverySettingMustBeIdenticalOnEveryRank) {
  struct Setting {
    std::string words;
    std::function<void(MoeLayerConfig&)> change;
  };
  const std::vector<Setting> settings = {
      {"num_experts=7", [](MoeLayerConfig& c) { c.router.num_experts = 7; }},
      {"top_k=1", [](MoeLayerConfig& c) { c.router.top_k = 1; }},
      {"width=9", [](MoeLayerConfig& c) { c.router.width = 9; }},
      {"dtype=fp32", [](MoeLayerConfig& c) { c.experts.dtype = DType::kF32; }},
      {"score=sigmoid", [](MoeLayerConfig& c) { c.router.score = Score::kSigmoid; }},
      {"groups=2/1/0", [](MoeLayerConfig& c) { c.router.num_groups = 2; }},
      {"groups=1/1/1", [](MoeLayerConfig& c) { c.router.group_score = GroupScore::kTop2; }},
      {"normalise=1", [](MoeLayerConfig& c) { c.router.normalise = true; }},
      {"scaling=1.0000000000009", [](MoeLayerConfig& c) { c.router.scaling += 0x1p-40; }},
      {"aux_loss=0.5/0", [](MoeLayerConfig& c) { c.router.aux_loss_coeff = 0.5; }},
      {"aux_loss=0/2",
       [](MoeLayerConfig& c) { c.router.aux_loss_scope = BalanceScope::kGlobalBatch; }},
      {"z_loss=0.5", [](MoeLayerConfig& c) { c.router.z_loss_coeff = 0.5; }},
      {"jitter=0.25", [](MoeLayerConfig& c) { c.router.jitter = 0.25; }},
      {"force_balance=1", [](MoeLayerConfig& c) { c.router.force_balance = true; }},
      {"inner=6", [](MoeLayerConfig& c) { c.experts.inner = 6; }},
      {"activation=geglu", [](MoeLayerConfig& c) { c.experts.activation = Activation::kGeglu; }},
      {"interleaved=1", [](MoeLayerConfig& c) { c.experts.interleaved = true; }},
      {"limit=7.5", [](MoeLayerConfig& c) { c.experts.limit = 7.5; }},
      {"weights_in=1", [](MoeLayerConfig& c) { c.experts.weights_in = WeightsIn::kExperts; }},
      {"shared_inner=3", [](MoeLayerConfig& c) { c.shared_inner = 3; }},
      {"overlap_chunks=2", [](MoeLayerConfig& c) { c.overlap_chunks = 2; }},
      {"etp=3", [](MoeLayerConfig& c) { c.etp = 3; }},
      {"allow_equal_tokens=1", [](MoeLayerConfig& c) { c.allow_equal_tokens = true; }},
      {"aux_loss_coeffs=0/0.5/0",
       [](MoeLayerConfig& c) { c.router.aux_loss_coeffs.sequence = 0.5; }},
      {"alignment=8", [](MoeLayerConfig& c) { c.dispatch.alignment = 8; }}};
  for (const Setting& setting : settings) {
    expect_refusal("rank 1 has " + setting.words, [&](Group& group, const LayerCase&) {
      LayerCaseOptions options = list_layer_cases(kRanks)[0].options;
      if (group.rank() == kCulprit) setting.change(options.config);
      run_layer(group, make_case(options));
    });
  }
}

TEST(MoeLayerRefusal, AConfigurationThatCannotBe) {
  expect_refusal("shared_inner must be in [0, 2147483647], got -3",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerCase other = layer_case;
                   other.config.shared_inner = group.rank() == kCulprit ? -3 : 0;
                   run_layer(group, other);
                 });
  expect_refusal("leave it out", [](Group& group, const LayerCase& layer_case) {
    LayerCase other = layer_case;
    other.config.dispatch.top_k = 3;
    run_layer(group, other);
  });
  expect_refusal("teleport", [](Group& group, const LayerCase& layer_case) {
    LayerCase other = layer_case;
    if (group.rank() == kCulprit) other.config.strategy = "teleport";
    run_layer(group, other);
  });
}

TEST(MoeLayerRefusal, CoefficientsThatAreNotFinite) {
  expect_refusal("aux_loss_coeff must be finite, got nan",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerCase other = layer_case;
                   if (group.rank() == kCulprit) other.config.router.aux_loss_coeff = std::nan("");
                   run_layer(group, other);
                 });
  expect_refusal("scaling must be finite, got inf", [](Group& group, const LayerCase& layer_case) {
    LayerCase other = layer_case;
    other.config.router.scaling = HUGE_VAL;
    run_layer(group, other);
  });
}

TEST(MoeLayerRefusal, ANegativeNumberOfSequences) {
  expect_refusal("total_sequences must not be negative, got -1",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   MoeForwardArgs args = rank.forward_args();
                   if (group.rank() == kCulprit) args.total_sequences = -1;
                   (void)rank.layer.forward(args);
                 });
}

TEST(MoeLayerRefusal, MoreSequencesThanCanBeCounted) {
  struct Setting {
    int64_t num_sequences;
    std::string words;
  };
  const std::vector<Setting> settings = {
      {int64_t{1} << 58, "num_sequences must be in [1, 2147483647], got 288230376151711744"},
      {int64_t{1} << 31, "num_sequences must be in [1, 2147483647], got 2147483648"},
      {int64_t{1} << 30, "num_sequences (1073741824) times num_experts + 1 (7) must be at most"}};
  for (const Setting& setting : settings) {
    expect_refusal(setting.words, [&](Group& group, const LayerCase& layer_case) {
      LayerCase other = layer_case;
      other.config.router.aux_loss_coeff = 0.5;
      other.config.router.aux_loss_scope = BalanceScope::kSequence;
      LayerOnRank rank(group, other);
      MoeForwardArgs args = rank.forward_args();
      if (group.rank() == kCulprit) args.num_sequences = setting.num_sequences;
      (void)rank.layer.forward(args);
    });
  }
}

TEST(MoeLayerRefusal, InnerWidthsThatCannotBeCounted) {
  const auto expect_refused = [](const std::string& words,
                                 const std::function<void(MoeLayerConfig&)>& change) {
    expect_refusal(words, [&](Group& group, const LayerCase& layer_case) {
      const RankParameters parameters(layer_case, group, 0.0);
      const RankTokens tokens(layer_case, group.rank());
      MoeLayerConfig config = layer_case.config;
      if (group.rank() == kCulprit) change(config);
      MoeLayer layer(group, config);
      (void)layer.forward({.weights = parameters.weights(), .x = tokens.x.view});
    });
  };
  static constexpr int64_t kTooMuch = int64_t{1} << 31;
  expect_refused("inner must be in [1, 2147483647], got 2147483648",
                 [](MoeLayerConfig& c) { c.experts.inner = kTooMuch; });
  expect_refused("shared_inner must be in [0, 2147483647], got 2147483648",
                 [](MoeLayerConfig& c) { c.shared_inner = kTooMuch; });
}

TEST(MoeLayerRefusal, AGradientOfTheWrongShape) {
  expect_refusal("grad of gate must be [6, 8] fp64, got [6] fp64",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   MoeForwardResult forward = rank.forward();
                   std::vector<double> wrong(6);
                   MoeBackwardArgs args = rank.backward_args(forward.saved);
                   if (group.rank() == kCulprit) args.grads.gate = TensorView(wrong.data(), {6});
                   rank.layer.backward(args);
                 });
}

TEST(MoeLayerRefusal, ASecondBackwardOfOneForward) {
  expect_refusal("saved must come from a forward that has had no backward yet",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   MoeForwardResult forward = rank.forward();
                   rank.backward(forward.saved);
                   rank.backward(forward.saved);
                 });
}

struct OtherLayer {
  std::string words;
  std::function<void(MoeLayerConfig&)> change;
};

// Layers that differ from the first layer case in one thing, and the refusal of their values.
std::vector<OtherLayer> list_other_layers() {
  const std::string router = "saved must come from a router with num_experts=6;top_k=2;width=8;";
  const std::string experts = "saved must come from experts with num_local_experts=2;width=8;";
  const std::string layer = "saved must come from a forward of this layer (rank 0 of 3), ";
  return {{router, [](MoeLayerConfig& c) { c.router.score = Score::kSigmoid; }},
          {router, [](MoeLayerConfig& c) { c.router.scaling = 2.0; }},
          {router, [](MoeLayerConfig& c) { c.router.top_k = 1; }},
          {router, [](MoeLayerConfig& c) { c.router.z_loss_coeff = 0.5; }},
          {experts, [](MoeLayerConfig& c) { c.router.width = 9; }},
          {experts, [](MoeLayerConfig& c) { c.experts.inner = 6; }},
          {experts, [](MoeLayerConfig& c) { c.experts.activation = Activation::kGeglu; }},
          {layer, [](MoeLayerConfig& c) { c.shared_inner = 3; }},
          {layer, [](MoeLayerConfig& c) { c.dispatch.alignment = 8; }},
          {layer + "got it from another layer (rank 0 of 3)", [](MoeLayerConfig&) {}}};
}

TEST(MoeLayerRefusal, ValuesSavedByAnotherLayer) {
  for (const OtherLayer& other_layer : list_other_layers()) {
    expect_refusal(other_layer.words, [&](Group& group, const LayerCase& layer_case) {
      LayerCaseOptions options = list_layer_cases(kRanks)[0].options;
      other_layer.change(options.config);
      const LayerCase other_case = make_case(options);
      LayerOnRank rank(group, layer_case);
      LayerOnRank other(group, other_case);
      MoeForwardResult forward = other.forward();
      rank.backward(forward.saved);
    });
  }
}

// The background thread of the overlap must not have begun.
TEST(MoeLayerRefusal, ValuesSavedByAnotherLayerWithOverlap) {
  expect_refusal("saved must come from a router with", [](Group& group, const LayerCase&) {
    LayerCaseOptions options = list_layer_cases(kRanks)[0].options;
    options.config.shared_inner = 3;
    options.config.overlap_chunks = 2;
    const LayerCase layer_case = make_case(options);
    options.config.router.scaling = 2.0;
    const LayerCase other_case = make_case(options);
    LayerOnRank rank(group, layer_case);
    LayerOnRank other(group, other_case);
    MoeForwardResult forward = other.forward();
    rank.backward(forward.saved);
  });
}

TEST(MoeLayerRefusal, ValuesSavedByALayerOfAnotherGroup) {
  expect_refusal(
      "saved must come from a forward of this layer (rank 0 of 3), got it from another",
      [](Group& group, const LayerCase& layer_case) {
        const std::unique_ptr<Group> same_ranks = group.subgroup(std::vector<int>{0, 1, 2});
        LayerOnRank rank(group, layer_case);
        LayerOnRank other(*same_ranks, layer_case);
        MoeForwardResult forward = other.forward();
        rank.backward(forward.saved);
      });
  expect_refusal("saved must come from experts with num_local_experts=2;width=8;",
                 [](Group& group, const LayerCase& layer_case) {
                   const std::unique_ptr<Group> alone =
                       group.subgroup(std::vector<int>{group.rank()});
                   LayerOnRank rank(group, layer_case);
                   LayerOnRank other(*alone, layer_case, {}, 0.0, group.rank());
                   MoeForwardResult forward = other.forward();
                   rank.backward(forward.saved);
                 });
}

TEST(MoeLayerRefusal, DelayedGradientsOfAnotherLayer) {
  const LayerCase layer_case = make_case(list_layer_cases(kRanks)[0].options);
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    LayerOnRank other(group, layer_case);
    MoeForwardResult forward = other.forward();
    MoeBackwardArgs args = other.backward_args(forward.saved);
    args.delay_dw = true;
    other.layer.backward(args);
    const auto backward_dw = [&](const MoeLayer& layer) {
      layer.backward_dw({.x = args.x,
                         .grad_out = args.grad_out,
                         .saved = args.saved,
                         .experts = args.grads.experts});
    };
    expect_refused(group, "saved must come from a forward of this layer",
                   [&] { backward_dw(rank.layer); });
    backward_dw(other.layer);
  });
}

TEST(MoeLayerRefusal, ADecisionOfAnotherLayer) {
  for (const double scaling : {1.0, 2.0}) {
    expect_refusal(scaling == 1.0 ? "decision must come from a forward of this layer (rank 0 of 3)"
                                  : "decision must come from a router with num_experts=6;",
                   [&](Group& group, const LayerCase& layer_case) {
                     LayerCase other_case = layer_case;
                     other_case.config.router.scaling = scaling;
                     LayerOnRank rank(group, layer_case);
                     LayerOnRank other(group, other_case);
                     const MoeForwardResult first = other.forward();
                     MoeForwardArgs args = rank.forward_args();
                     args.decision = &first.saved.decision;
                     (void)rank.layer.forward(args);
                   });
  }
}

TEST(MoeLayerRefusal, ASecondBackwardAfterOneThatDelaysGradients) {
  expect_refusal("saved must come from a forward that has had no backward yet",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   MoeForwardResult forward = rank.forward();
                   MoeBackwardArgs args = rank.backward_args(forward.saved);
                   args.delay_dw = true;
                   rank.layer.backward(args);
                   try {
                     rank.layer.backward(args);
                   } catch (const Error&) {
                     rank.layer.backward_dw({.x = args.x,  // `saved` is still complete
                                             .grad_out = args.grad_out,
                                             .saved = args.saved,
                                             .experts = args.grads.experts});
                     throw;
                   }
                 });
}

TEST(MoeLayerRefusal, ABackwardOfAnotherForward) {
  expect_refusal("rank 1 is at layer_backward of plan",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   MoeForwardResult first = rank.forward();
                   MoeForwardResult second = rank.forward();
                   rank.backward(group.rank() == kCulprit ? first.saved : second.saved);
                 });
}

TEST(MoeLayerRefusal, ARecomputationOnSomeRanksOnly) {
  expect_refusal("rank 1 is at route while the others are at route of plan",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   const MoeForwardResult first = rank.forward();
                   MoeForwardArgs args = rank.forward_args();
                   if (group.rank() != kCulprit) args.decision = &first.saved.decision;
                   (void)rank.layer.forward(args);
                 });
}

TEST(MoeLayerRefusal, ADecisionWithNumbersElsewhere) {
  int64_t somewhere = 0;
  const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
  expect_refusal("decision must have its numbers where the tokens are, in host memory",
                 [&](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   MoeForwardResult first = rank.forward();
                   if (group.rank() == kCulprit) {
                     first.saved.decision.statistics.device_counts.view =
                         TensorView(&somewhere, DType::kI64, {1}, gpu);
                   }
                   rank.backward(first.saved);
                 });
}

TEST(MoeLayerRefusal, ADecisionAboutOtherTokens) {
  expect_refusal("decision is for 6 tokens, but x has 5",
                 [](Group& group, const LayerCase& layer_case) {
                   LayerOnRank rank(group, layer_case);
                   const MoeForwardResult first = rank.forward();
                   MoeForwardArgs args = rank.forward_args();
                   args.decision = &first.saved.decision;
                   if (group.rank() == kCulprit) {
                     args.x = ConstTensorView(args.x.data, DType::kF64, {5, args.x.shape[1]});
                   }
                   (void)rank.layer.forward(args);
                 });
}

// A strategy that has no memory for the experts' result on one rank.
class WithoutMemory : public ForwardingStrategy {
 public:
  explicit WithoutMemory(bool is_short)
      : ForwardingStrategy(make_strategy("alltoall")), is_short_(is_short) {}
  OwnedTensor allocate_rows(const StrategyCall& strategy_call, DType dtype, Shape shape) override {
    if (is_short_ && std::string_view(strategy_call.operation) == "allocate_rows")
      throw std::bad_alloc();
    return inner().allocate_rows(strategy_call, dtype, shape);
  }

 private:
  bool is_short_;
};

TEST(MoeLayerFailure, BetweenDispatchAndCombineReleasesThePeers) {
  const LayerCase layer_case = make_case(list_layer_cases(kRanks)[0].options);
  run_ranks(kRanks, [&](Group& group) {
    std::string message = "nothing was thrown";
    try {
      run_layer(group, layer_case,
                {.strategy = std::make_unique<WithoutMemory>(group.rank() == kCulprit)});
    } catch (const Error& error) {
      message = error.what();
      EXPECT_EQ(error.context().culprit, kCulprit) << "rank " << group.rank();
    }
    EXPECT_THAT(message, HasSubstr("not enough memory")) << "rank " << group.rank();
    EXPECT_TRUE(group.is_poisoned());
  });
}

}  // namespace
}  // namespace crossdock
