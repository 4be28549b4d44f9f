#include "layer/check_args.hpp"

#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "layer/route_counts.hpp"
#include "router/router_checks.hpp"

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

// Rows that the gradients of the experts are computed from.
Tensors list_saved(const MoeSaved& saved) {
  return {{"rows of saved", saved.sent.rows.view},
          {"row weights of saved", saved.sent.row_weights.view},
          {"grad_y of saved", saved.grad_y.rows.view},
          {"grad_y's row weights of saved", saved.grad_y.row_weights.view}};
}

// The dispatcher would refuse the plan of another layer too, but only when the call has begun.
void check_origin(const char* name, const LayerParts& parts, const MoeDecision& decision) {
  router::check_origin(name, parts.router.config(), *decision.router);
  const PlanData& plan = decision.plan.data();
  CROSSDOCK_CHECK(plan.config.get() == &parts.dispatcher.config(), name,
                  " must come from a forward of this layer (rank ", parts.group.rank(), " of ",
                  parts.group.size(), "), got it from another layer (rank ", plan.rank, " of ",
                  plan.P, ")");
}

// Backward uses the decision's numbers, so they must be where the tokens are.
void check_place(const MoeDecision& decision, Device device) {
  CROSSDOCK_CHECK(decision.plan.device() == device,
                  "x must be on the device of the forward that decision comes from");
  CROSSDOCK_CHECK(decision.statistics.is_on_device() == !device.is_cpu(),
                  "decision must have its numbers where the tokens are, ",
                  device.is_cpu() ? "in host memory"
                                  : "on the GPU; pass the decision of the forward, "
                                    "not a copy by on_host");
}

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

}  // namespace

void check_outputs(const LayerParts& parts, const MoeForwardArgs& args) {
  const Shape tokens{args.x.num_rows(), parts.config.router.width};
  if (args.out.given()) {
    check_tensor("out", args.out, args.x.device, parts.config.experts.dtype, tokens);
  }
  check_outputs(args);
}

void check_outputs(const LayerParts& parts, const MoeBackwardArgs& args) {
  const Shape tokens{args.x.num_rows(), parts.config.router.width};
  if (args.grad_x.given()) {
    check_tensor("grad_x", args.grad_x, args.x.device, parts.config.experts.dtype, tokens);
  }
  CROSSDOCK_CHECK(args.saved != nullptr, "saved must come from a forward, got none");
  check_outputs(args);
}

void check_args(const LayerParts& parts, const MoeForwardArgs& args) {
  const MoeLayerConfig& config = parts.config;
  const Shape tokens{args.x.num_rows(), config.router.width};
  const Device device = args.x.device;
  if (!device.is_cpu()) parts.check_gpu(device);
  check_tensor("x", args.x, device, config.experts.dtype, tokens);
  CROSSDOCK_CHECK(args.total_sequences >= 0, "total_sequences must not be negative, got ",
                  args.total_sequences);
  if (args.out.given()) check_tensor("out", args.out, device, config.experts.dtype, tokens);
  parts.experts.check(args.weights.experts, device);
  if (parts.shared) parts.shared->experts().check(args.weights.shared, device);
  check_outputs(args);
  if (args.decision == nullptr) return check_earlier(config.router, args.earlier, device);
  CROSSDOCK_CHECK(args.decision->router != nullptr && args.decision->plan.valid(),
                  "decision must come from an earlier forward, got an empty one");
  check_origin("decision", parts, *args.decision);
  CROSSDOCK_CHECK(args.decision->plan.num_tokens() == tokens[0], "decision is for ",
                  args.decision->plan.num_tokens(), " tokens, but x has ", tokens[0],
                  "; pass the tokens of the forward that it comes from");
  check_place(*args.decision, device);
}

void check_args(const LayerParts& parts, const MoeBackwardArgs& args) {
  CROSSDOCK_CHECK(args.saved != nullptr && args.saved->sent.rows.view.given() &&
                      !args.saved->grad_y.rows.view.given(),
                  "saved must come from a forward that has had no backward yet");
  parts.experts.check(args.saved->experts);
  if (parts.shared) parts.shared->experts().check(args.saved->shared);
  check_origin("saved", parts, args.saved->decision);
  const DType dtype = parts.config.experts.dtype;
  const DType sums = args.saved->decision.router->weight_dtype;
  const int64_t E = parts.config.router.num_experts;
  const int64_t D = parts.config.router.width;
  const Shape tokens{args.saved->decision.plan.num_tokens(), D};
  const Device device = args.saved->decision.plan.device();
  check_place(args.saved->decision, device);
  check_tensor("x", args.x, device, dtype, tokens);
  check_tensor("grad_out", args.grad_out, device, dtype, tokens);
  if (args.grad_x.given()) check_tensor("grad_x", args.grad_x, device, dtype, tokens);
  if (args.grads.gate.given()) check_tensor("grad of gate", args.grads.gate, device, sums, {E, D});
  if (args.grads.gate_bias.given()) {
    check_tensor("grad of gate_bias", args.grads.gate_bias, device, sums, {E});
  }
  const bool accumulate = args.accumulate && !args.delay_dw;
  parts.experts.check(args.weights.experts, device);
  parts.experts.check(args.grads.experts, device, accumulate);
  check_outputs(args);
  if (!parts.shared) return;
  parts.shared->experts().check(args.weights.shared, device);
  parts.shared->experts().check(args.grads.shared, device, accumulate);
}

void check_args(const LayerParts& parts, const MoeBackwardDwArgs& args) {
  CROSSDOCK_CHECK(args.saved != nullptr && args.saved->grad_y.rows.view.given(),
                  "saved must come from a backward with delay_dw");
  check_origin("saved", parts, args.saved->decision);
  check_outputs(args);
}

}  // namespace crossdock
