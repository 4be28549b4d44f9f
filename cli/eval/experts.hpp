#pragma once

#include <memory>
#include <vector>

#include "cli/eval/case.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::cli {

/// The experts of one rank of a case, for the rows of one plan: MLPs, or, in a case without
/// parameters, experts that return their rows (multiplied by the weights, if experts apply those).
class LocalExperts {
 public:
  /// `sent` must have the row weights. All arguments must outlive this object.
  LocalExperts(const EvalCase& eval_case, const Plan& plan, const DispatchResult& sent);
  ~LocalExperts();

  /// Whether forward applies the weights; then combine must not.
  bool apply_weights() const { return case_.layer.weights_in_experts; }

  /// y [R, D]
  OwnedTensor forward();

  struct Gradients {
    OwnedTensor rows;         // [R, D]
    OwnedTensor row_weights;  // [R]
  };

  /// `grad_y` [R, D] is the dispatched grad_out, not multiplied by weights. Writes the entries of
  /// this rank's experts in `expert_grads` [E], if the case has parameters.
  Gradients backward(ConstTensorView grad_y, std::vector<reference::MlpWeights>& expert_grads);

 private:
  struct Mlp;
  const EvalCase& case_;
  const Plan& plan_;
  const DispatchResult& sent_;
  std::unique_ptr<Mlp> mlp_;  // null: experts return their rows
};

}  // namespace crossdock::cli
