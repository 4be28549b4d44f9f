#include "bench/mover.hpp"
#include "crossdock/dispatcher.hpp"

namespace crossdock::bench {
namespace {

class LibraryMover final : public Mover {
 public:
  LibraryMover(const MoverInputs& inputs, std::string_view strategy)
      : inputs_(inputs), dispatcher_(inputs.group, inputs.workload.dispatch_config(), strategy) {}

  void plan() override {
    const Scenario& scenario = inputs_.workload.scenario();
    const int rank = inputs_.group.rank();
    const Shape shape{scenario.tokens, scenario.top_k};
    plan_ = dispatcher_.plan({.expert_ids = {inputs_.workload.expert_ids(rank).data(), shape},
                              .weights = {inputs_.workload.weights(rank).data(), shape}});
  }

  // Previous results are returned to the pool first, as in a training step.
  void dispatch() override {
    sent_ = {};
    sent_ = dispatcher_.dispatch(plan_, {.x = inputs_.x});
  }
  void combine() override {
    out_ = {};
    out_ = dispatcher_.combine(plan_, y());
  }
  void combine_backward() override {
    grads_ = {};
    grads_ = dispatcher_.combine_backward(plan_, inputs_.grad_out, y());
  }
  void dispatch_backward() override {
    grad_x_ = {};
    grad_x_ = dispatcher_.dispatch_backward(plan_, y());
  }

  TensorView y() override {
    if (!y_.view.given()) y_ = dispatcher_.allocate_rows(plan_, inputs_.x.dtype);
    return y_.view;
  }
  ConstTensorView rows() const override { return sent_.rows.view; }
  ConstTensorView out() const override { return out_.view; }
  ConstTensorView grad_rows() const override { return grads_.grad_rows.view; }
  ConstTensorView grad_x() const override { return grad_x_.view; }

 private:
  MoverInputs inputs_;
  Dispatcher dispatcher_;
  Plan plan_;
  DispatchResult sent_;
  OwnedTensor y_;
  OwnedTensor out_;
  CombineBackwardResult grads_;
  OwnedTensor grad_x_;
};

}  // namespace

std::unique_ptr<Mover> make_library_mover(const MoverInputs& inputs, std::string_view strategy) {
  return std::make_unique<LibraryMover>(inputs, strategy);
}

}  // namespace crossdock::bench
