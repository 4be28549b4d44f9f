#include "layer/aliasing.hpp"

#include <vector>

#include "core/tensor_check.hpp"

namespace crossdock {
namespace {

using Tensors = std::vector<NamedTensor>;

void append(const Tensors& more, Tensors& tensors) {
  tensors.insert(tensors.end(), more.begin(), more.end());
}

Tensors list_parameters(const MoeLayerWeights& weights) {
  return {{"gate", weights.gate.weight},
          {"gate's bias", weights.gate.bias},
          {"expert_bias", weights.expert_bias},
          {"w1", weights.experts.w1},
          {"w2", weights.experts.w2},
          {"b1", weights.experts.b1},
          {"b2", weights.experts.b2},
          {"w1 of shared experts", weights.shared.w1},
          {"w2 of shared experts", weights.shared.w2},
          {"b1 of shared experts", weights.shared.b1},
          {"b2 of shared experts", weights.shared.b2}};
}

Tensors list_gradients(const ExpertGradients& experts, const ExpertGradients& shared) {
  return {{"grad of w1", experts.w1},
          {"grad of w2", experts.w2},
          {"grad of b1", experts.b1},
          {"grad of b2", experts.b2},
          {"grad of w1 of shared experts", shared.w1},
          {"grad of w2 of shared experts", shared.w2},
          {"grad of b1 of shared experts", shared.b1},
          {"grad of b2 of shared experts", shared.b2}};
}

// What the forward left for gradients of the experts.
Tensors list_saved(const MoeSaved& saved) {
  return {{"rows of saved", saved.sent.rows.view},
          {"row weights of saved", saved.sent.row_weights.view},
          {"grad_y of saved", saved.grad_y.rows.view},
          {"grad_y's row weights of saved", saved.grad_y.row_weights.view}};
}

}  // namespace

void check_outputs(const MoeForwardArgs& args) {
  Tensors inputs = {{"x", args.x},
                    {"mask", args.mask},
                    {"sequence_ids", args.sequence_ids},
                    {"forced_ids", args.forced_ids},
                    {"token_ids", args.token_ids}};
  append(list_parameters(args.weights), inputs);
  check_no_overlap({{"out", args.out}}, inputs);
}

void check_outputs(const MoeBackwardArgs& args) {
  Tensors inputs = {{"x", args.x}, {"grad_out", args.grad_out}};
  append(list_parameters(args.weights), inputs);
  append(list_saved(*args.saved), inputs);
  Tensors outputs = {{"grad_x", args.grad_x},
                     {"grad of gate", args.grads.gate},
                     {"grad of gate_bias", args.grads.gate_bias}};
  append(list_gradients(args.grads.experts, args.grads.shared), outputs);
  check_no_overlap(outputs, inputs);
}

void check_outputs(const MoeBackwardDwArgs& args) {
  Tensors inputs = {{"x", args.x}, {"grad_out", args.grad_out}};
  append(list_saved(*args.saved), inputs);
  check_no_overlap(list_gradients(args.experts, args.shared), inputs);
}

}  // namespace crossdock
