#pragma once

#include <memory>

#include "crossdock/experts.hpp"

namespace crossdock {

/// A dense MLP beside the routed experts, applied to each rank's own tokens without any exchange.
/// Bits, thread safety and checks are as in Experts.
class SharedExperts {
 public:
  /// Overrides num_local_experts and weights_in: one expert, no weights.
  SharedExperts(ExpertsConfig config, std::shared_ptr<ThreadPool> pool);

  const Experts& experts() const { return experts_; }

  /// y [T, D] = MLP(x [T, D])
  ExpertsSaved forward(const ExpertWeights& weights, ConstTensorView x, TensorView y) const;

  /// Computes grad_x [T, D] and prepares `saved` for backward_dw.
  struct BackwardDxArgs {
    ExpertWeights weights;
    ConstTensorView x;         // [T, D]
    ConstTensorView grad_out;  // [T, D]
    ExpertsSaved* saved = nullptr;
    TensorView grad_x;  // out [T, D]
  };
  void backward_dx(const BackwardDxArgs& args) const;

  struct BackwardDwArgs {
    ConstTensorView x;         // [T, D]
    ConstTensorView grad_out;  // [T, D]
    const ExpertsSaved* saved = nullptr;
    ExpertGradients grads;
    bool accumulate = false;
  };
  void backward_dw(const BackwardDwArgs& args) const;

  /// sum += term, rounded once; both [T, D] of one dtype.
  void add(ConstTensorView term, TensorView sum) const;

 private:
  std::shared_ptr<ThreadPool> pool_;
  Experts experts_;
};

}  // namespace crossdock
