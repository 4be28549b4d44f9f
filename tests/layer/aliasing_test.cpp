// An output of the layer that shares memory with an input, or with another output, is refused by
// all ranks.
#include <gtest/gtest.h>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

constexpr int kRanks = 3;
constexpr int kCulprit = 2;

// A layer on one rank that writes to memory of the caller.
struct Step {
  LayerOnRank rank;
  OwnedTensor out;
  OwnedTensor grad_x;

  Step(Group& group, const LayerCase& layer_case)
      : rank(group, layer_case),
        out(group.pool().take(layer_case.dtype(), rank.tokens.x.view.shape)),
        grad_x(group.pool().take(layer_case.dtype(), rank.tokens.x.view.shape)) {}

  MoeForwardArgs forward_args() const {
    MoeForwardArgs args = rank.forward_args();
    args.out = out.view;
    return args;
  }
  MoeBackwardArgs backward_args(MoeSaved& saved) const {
    MoeBackwardArgs args = rank.backward_args(saved);
    args.grad_x = grad_x.view;
    return args;
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

// With everything: shared experts, biases, a mask. The culprit has tokens.
void on_ranks(const std::function<void(Group&, MoeLayer&, Step&)>& body) {
  const LayerCase layer_case = make_case(list_layer_cases(kRanks)[2].options);
  run_ranks(kRanks, [&](Group& group) {
    Step step(group, layer_case);
    MoeLayer& layer = step.rank.layer;
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
      expect_refused(group, "rank 2: " + words, [&] { (void)layer.forward(args); });
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
      expect_refused(group, "rank 2: " + words, [&] { layer.backward(args); });
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
