// An output of the layer that shares memory with an input, or with another output, is refused by
// all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "layer/layer_cases.hpp"
#include "support/message_of.hpp"

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

// Two tensors in one piece of memory: the first row of `output` is the last of `other`. An ordinary
// tensor may be followed by an unrelated one, which the output would overlap too.
class OverlappingPair {
 public:
  template <class View>
  void place(View& other, TensorView& output) {
    const int64_t begin = other.num_bytes() - other.row_bytes();
    memory_.assign(static_cast<size_t>(begin + output.num_bytes()), std::byte{0});
    other.data = memory_.data();
    output.data = memory_.data() + begin;
  }

 private:
  std::vector<std::byte> memory_;
};

TensorView mutable_view(const ConstTensorView& tensor) {
  return {const_cast<void*>(tensor.data), tensor.dtype, tensor.shape};
}

// A layer with all options: shared experts, biases, a mask. The culprit has tokens.
void on_ranks(const std::function<void(Group&, MoeLayer&, Step&)>& body) {
  const LayerCase layer_case = make_case(list_layer_cases(kRanks)[2].options);
  run_ranks(kRanks, [&](Group& group) {
    Step step(group, layer_case);
    MoeLayer& layer = step.rank.layer;
    body(group, layer, step);
    MoeForwardResult forward = layer.forward(step.forward_args());  // the group stays usable
    layer.backward(step.backward_args(forward.saved));
  });
}

TEST(MoeLayerAliasing, AnOutputThatOverlapsAnInputOfTheForward) {
  OverlappingPair pair;
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
  expect("out overlaps x", [&](MoeForwardArgs& args) { pair.place(args.x, args.out); });
  expect("out overlaps w2 of shared experts",
         [&](MoeForwardArgs& args) { pair.place(args.weights.shared.w2, args.out); });
}

TEST(MoeLayerAliasing, AnOutputThatOverlapsAnInputOrOutputOfTheBackward) {
  OverlappingPair pair;
  const auto expect = [](const std::string& words,
                         const std::function<void(MoeBackwardArgs&)>& change) {
    on_ranks([&](Group& group, MoeLayer& layer, Step& step) {
      MoeForwardResult forward = layer.forward(step.forward_args());
      MoeBackwardArgs args = step.backward_args(forward.saved);
      if (group.rank() == kCulprit) change(args);
      expect_refused(group, "rank 2: " + words, [&] { layer.backward(args); });
      if (group.rank() == kCulprit) args = step.backward_args(forward.saved);
      layer.backward(args);  // the forward's saved values are intact
    });
  };
  expect("grad_x overlaps grad_out",
         [](MoeBackwardArgs& args) { args.grad_x = mutable_view(args.grad_out); });
  expect("grad_x overlaps grad_out",
         [&](MoeBackwardArgs& args) { pair.place(args.grad_out, args.grad_x); });
  expect("grad_x overlaps x", [](MoeBackwardArgs& args) { args.grad_x = mutable_view(args.x); });
  expect("grad of gate overlaps gate",
         [](MoeBackwardArgs& args) { args.grads.gate = mutable_view(args.weights.gate.weight); });
  expect("grad of w2 overlaps grad of w1",
         [&](MoeBackwardArgs& args) { pair.place(args.grads.experts.w1, args.grads.experts.w2); });
  expect("grad of w1 of shared experts overlaps grad_x",
         [&](MoeBackwardArgs& args) { pair.place(args.grad_x, args.grads.shared.w1); });
}

TEST(MoeLayerAliasing, AnOutputThatOverlapsAnInputOfDelayedGradients) {
  on_ranks([](Group& group, MoeLayer& layer, Step& step) {
    MoeForwardResult forward = layer.forward(step.forward_args());
    MoeBackwardArgs args = step.backward_args(forward.saved);
    args.delay_dw = true;
    layer.backward(args);
    if (group.rank() != kCulprit) return;
    const MoeBackwardDwArgs dw{.x = args.x,
                               .grad_out = args.grad_out,
                               .saved = &forward.saved,
                               .experts = args.grads.experts,
                               .shared = args.grads.shared};
    OverlappingPair pair;
    MoeBackwardDwArgs wrong = dw;
    pair.place(wrong.x, wrong.shared.w1);
    EXPECT_THAT(message_of([&] { layer.backward_dw(wrong); }),
                ::testing::HasSubstr("grad of w1 of shared experts overlaps x"));
    wrong = dw;
    pair.place(wrong.experts.w1, wrong.shared.w1);
    EXPECT_THAT(message_of([&] { layer.backward_dw(wrong); }),
                ::testing::HasSubstr("grad of w1 of shared experts overlaps grad of w1"));
    layer.backward_dw(dw);
  });
}

}  // namespace
}  // namespace crossdock
