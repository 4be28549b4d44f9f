// An output of the layer that shares memory with an input, or with another output, is refused by
// all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kCulprit = 2;

// What one rank gives to a forward and a backward; separate memory everywhere.
struct Step {
  RankParameters parameters;
  RankTokens tokens;
  OwnedTensor out;
  OwnedTensor grad_x;

  Step(Group& group, const LayerCase& layer_case)
      : parameters(layer_case, group, 0.0),
        tokens(layer_case, group.rank()),
        out(group.pool().take(layer_case.dtype(), tokens.x.view.shape)),
        grad_x(group.pool().take(layer_case.dtype(), tokens.x.view.shape)) {}

  MoeForwardArgs forward_args() const {
    return {.weights = parameters.weights(),
            .x = tokens.x.view,
            .out = out.view,
            .mask = tokens.mask.view};
  }
  MoeBackwardArgs backward_args(MoeSaved& saved) const {
    return {.weights = parameters.weights(),
            .x = tokens.x.view,
            .grad_out = tokens.grad_out.view,
            .saved = &saved,
            .grads = parameters.grads(),
            .grad_x = grad_x.view};
  }
};

// A view of `other`'s shape whose first row is the last of `tensor`.
TensorView from_last_row_of(const TensorView& tensor, const TensorView& other) {
  auto* data = static_cast<std::byte*>(tensor.data) + tensor.num_bytes() - tensor.row_bytes();
  return {data, other.dtype, other.shape};
}

TensorView mutable_view(const ConstTensorView& tensor) {
  return {const_cast<void*>(tensor.data), tensor.dtype, tensor.shape};
}

void expect_message(Group& group, const std::string& words, const std::function<void()>& call) {
  std::string message = "nothing was thrown";
  try {
    call();
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_THAT(message, HasSubstr("rank 2: " + words)) << "rank " << group.rank();
  EXPECT_FALSE(group.is_poisoned());
}

// With everything: shared experts, biases, a mask. The culprit has tokens.
void on_ranks(const std::function<void(Group&, MoeLayer&, Step&)>& body) {
  const LayerCase layer_case = make_case(list_layer_cases(kRanks)[2].options);
  run_ranks(kRanks, [&](Group& group) {
    MoeLayer layer(group, layer_case.config);
    Step step(group, layer_case);
    body(group, layer, step);
    MoeForwardResult forward = layer.forward(step.forward_args());  // the group goes on
    layer.backward(step.backward_args(forward.saved));
  });
}

TEST(MoeLayerAliasing, AnOutputThatOverlapsAnInputOfTheForward) {
  const auto expect = [](const std::string& words,
                         const std::function<void(MoeForwardArgs&)>& change) {
    on_ranks([&](Group& group, MoeLayer& layer, Step& step) {
      MoeForwardArgs args = step.forward_args();
      if (group.rank() == kCulprit) change(args);
      expect_message(group, words, [&] { layer.forward(args); });
    });
  };
  expect("out overlaps x; outputs must have memory of their own",
         [](MoeForwardArgs& args) { args.out = mutable_view(args.x); });
  expect("out overlaps x",
         [](MoeForwardArgs& args) { args.out = from_last_row_of(mutable_view(args.x), args.out); });
  expect("out overlaps w2 of shared experts", [](MoeForwardArgs& args) {
    args.out = from_last_row_of(mutable_view(args.weights.shared.w2), args.out);
  });
}

TEST(MoeLayerAliasing, AnOutputThatOverlapsAnInputOrOutputOfTheBackward) {
  const auto expect = [](const std::string& words,
                         const std::function<void(MoeBackwardArgs&)>& change) {
    on_ranks([&](Group& group, MoeLayer& layer, Step& step) {
      MoeForwardResult forward = layer.forward(step.forward_args());
      MoeBackwardArgs args = step.backward_args(forward.saved);
      if (group.rank() == kCulprit) change(args);
      expect_message(group, words, [&] { layer.backward(args); });
      if (group.rank() == kCulprit) args = step.backward_args(forward.saved);
      layer.backward(args);  // the forward is not used up
    });
  };
  expect("grad_x overlaps grad_out",
         [](MoeBackwardArgs& args) { args.grad_x = mutable_view(args.grad_out); });
  expect("grad_x overlaps grad_out", [](MoeBackwardArgs& args) {
    args.grad_x = from_last_row_of(mutable_view(args.grad_out), args.grad_x);
  });
  expect("grad_x overlaps x", [](MoeBackwardArgs& args) { args.grad_x = mutable_view(args.x); });
  expect("grad of gate overlaps gate",
         [](MoeBackwardArgs& args) { args.grads.gate = mutable_view(args.weights.gate.weight); });
  expect("grad of w2 overlaps grad of w1", [](MoeBackwardArgs& args) {
    args.grads.experts.w2 = from_last_row_of(args.grads.experts.w1, args.grads.experts.w2);
  });
  expect("grad of w1 of shared experts overlaps grad_x", [](MoeBackwardArgs& args) {
    args.grads.shared.w1 = from_last_row_of(args.grad_x, args.grads.shared.w1);
  });
}

TEST(MoeLayerAliasing, AnOutputThatOverlapsAnInputOfDelayedGradients) {
  on_ranks([](Group& group, MoeLayer& layer, Step& step) {
    MoeForwardResult forward = layer.forward(step.forward_args());
    MoeBackwardArgs args = step.backward_args(forward.saved);
    args.delay_dw = true;
    layer.backward(args);
    if (group.rank() != kCulprit) return;
    MoeBackwardDwArgs dw{.x = args.x,
                         .grad_out = args.grad_out,
                         .saved = &forward.saved,
                         .experts = args.grads.experts,
                         .shared = args.grads.shared};
    dw.shared.w1 = from_last_row_of(mutable_view(args.x), dw.shared.w1);
    EXPECT_THROW(layer.backward_dw(dw), Error);
    dw.shared.w1 = from_last_row_of(dw.experts.w1, dw.shared.w1);
    EXPECT_THROW(layer.backward_dw(dw), Error);
    dw.shared.w1 = args.grads.shared.w1;
    layer.backward_dw(dw);
  });
}

}  // namespace
}  // namespace crossdock
