#include "layer/layer_parts.hpp"

#include <utility>

namespace crossdock {
namespace {

std::optional<SharedExperts> make_shared_experts(const MoeLayerConfig& config,
                                                 const std::shared_ptr<ThreadPool>& pool) {
  if (config.shared_inner == 0) return std::nullopt;
  ExpertsConfig shared = config.experts;
  shared.inner = config.shared_inner;
  return SharedExperts(shared, pool);
}

Dispatcher make_dispatcher(Group& group, const MoeLayerConfig& config, MoeLayerOptions& options) {
  if (options.strategy) return Dispatcher(group, config.dispatch, std::move(options.strategy));
  return Dispatcher(group, config.dispatch, config.strategy, options.candidates);
}

}  // namespace

LayerParts::LayerParts(Group& group_in, const MoeLayerConfig& config_in, MoeLayerOptions& options)
    : group(group_in),
      config(config_in),
      pool(options.pool ? options.pool : group.threads()),
      router(config.router, pool),
      experts(config.experts, pool),
      shared(make_shared_experts(config, pool)),
      dispatcher(make_dispatcher(group, config, options)) {}

ExpertsForwardArgs LayerParts::prepare_forward(const MoeForwardArgs& args, const Plan& plan,
                                               const DispatchResult& sent, OwnedTensor& y) {
  y = dispatcher.allocate_rows(plan, args.x.dtype);
  return {.weights = args.weights.experts,
          .rows = sent.rows.view,
          .segments = plan.segments(),
          .row_weights = sent.row_weights.view,
          .y = y.view};
}

OwnedTensor LayerParts::forward_experts(const MoeForwardArgs& args, MoeSaved& saved) {
  OwnedTensor y;
  const ExpertsForwardArgs rows = prepare_forward(args, saved.decision.plan, saved.sent, y);
  const EventRecorder::Scope scope(group.recorder(), "experts", 0);
  saved.experts = experts.forward(rows);
  return y;
}

ExpertsBackwardDxArgs LayerParts::prepare_backward(const MoeBackwardArgs& args,
                                                   const DispatchResult& grad_y,
                                                   BackwardRows& rows) {
  const Plan& plan = args.saved->decision.plan;
  const DType weight_dtype = args.saved->decision.router->weight_dtype;
  rows.grad_rows = dispatcher.allocate_rows(plan, args.x.dtype);
  rows.grad_row_weights = group.pool().take(weight_dtype, {plan.num_rows()});
  return {.weights = args.weights.experts,
          .rows = args.saved->sent.rows.view,
          .segments = plan.segments(),
          .row_weights = grad_y.row_weights.view,
          .grad_y = grad_y.rows.view,
          .saved = &args.saved->experts,
          .grad_rows = rows.grad_rows.view,
          .grad_row_weights = rows.grad_row_weights.view,
          .keep_for_dw = args.delay_dw || any_given(args.grads.experts)};
}

void LayerParts::backward_experts(const MoeBackwardArgs& args, BackwardRows& rows) {
  const ExpertsBackwardDxArgs dx = prepare_backward(args, args.saved->grad_y, rows);
  const EventRecorder::Scope scope(group.recorder(), "experts_dx", 0);
  experts.backward_dx(dx);
}

OwnedTensor LayerParts::forward_shared(const MoeForwardArgs& args, MoeSaved& saved) {
  if (!shared) return {};
  const EventRecorder::Scope scope(group.recorder(), "shared_experts", 0);
  OwnedTensor y = group.pool().take(args.x.dtype, args.x.shape);
  saved.shared = shared->forward(args.weights.shared, args.x, y.view);
  return y;
}

OwnedTensor LayerParts::backward_shared(const MoeBackwardArgs& args) {
  if (!shared) return {};
  const EventRecorder::Scope scope(group.recorder(), "shared_experts_dx", 0);
  OwnedTensor grad_x = group.pool().take(args.x.dtype, args.x.shape);
  shared->backward_dx({.weights = args.weights.shared,
                       .x = args.x,
                       .grad_out = args.grad_out,
                       .saved = &args.saved->shared,
                       .grad_x = grad_x.view});
  return grad_x;
}

bool any_given(const ExpertGradients& grads) {
  return grads.w1.given() || grads.w2.given() || grads.b1.given() || grads.b2.given();
}

}  // namespace crossdock
