#include "layer/layer_parts.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "experts/partial_rows.hpp"

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
  const DispatchConfig dispatch = shard_experts(config.dispatch, config.etp, group.size());
  if (options.strategy) return Dispatcher(group, dispatch, std::move(options.strategy));
  return Dispatcher(group, dispatch, config.strategy, options.candidates);
}

}  // namespace

LayerParts::LayerParts(Group& group_in, const MoeLayerConfig& config_in, MoeLayerOptions& options)
    : group(group_in),
      config(config_in),
      shard{.etp = config.etp, .index = group.rank() % config.etp},
      pool(options.pool ? options.pool : group.threads()),
      router(config.router, pool),
      experts(shard_of(config.experts, shard), pool),
      shared(make_shared_experts(config, pool)),
      dispatcher(make_dispatcher(group, config, options)) {}

Plan LayerParts::plan(const RouterOutput& routes) {
  if (shard.etp == 1) return dispatcher.plan(routes.routing());
  ShardedRoutes sharded;
  run_agreed(group, [&] { sharded = shard_routes(routes.routing(), shard.etp); });
  return dispatcher.plan(sharded.routing());
}

std::vector<int64_t> LayerParts::dropped(const Plan& plan) const {
  const std::span<const int64_t> of_shards = plan.dropped();
  std::vector<int64_t> counts;
  for (size_t i = 0; i < of_shards.size(); i += static_cast<size_t>(shard.etp)) {
    counts.push_back(of_shards[i]);
  }
  return counts;
}

DType LayerParts::result_dtype() const {
  const DType dtype = config.experts.dtype;
  return shard.etp == 1 || dtype == DType::kF64 ? dtype : DType::kF32;
}

ExpertWeights LayerParts::shard_weights(const ExpertWeights& weights) const {
  ExpertWeights own = weights;
  if (shard.index > 0) own.b2 = {};
  return own;
}

TensorView LayerParts::sum_output(const TensorView& out) const {
  return result_dtype() == config.experts.dtype ? out : TensorView();
}

OwnedTensor LayerParts::round(OwnedTensor sums, const TensorView& out) {
  if (result_dtype() == config.experts.dtype) return sums;
  OwnedTensor rounded{.view = out, .owner = nullptr};
  run_agreed(group, [&] {
    if (!out.given()) rounded = group.pool().take(config.experts.dtype, sums.view.shape);
    round_sums(sums.view, rounded.view, *pool);
  });
  return rounded;
}

OwnedTensor LayerParts::combine(const Plan& plan, ConstTensorView y, TensorView out) {
  const TensorView direct = sum_output(out);
  return round(weights_in_experts() ? dispatcher.combine_unweighted(plan, y, direct)
                                    : dispatcher.combine(plan, y, direct),
               out);
}

OwnedTensor LayerParts::dispatch_backward(const Plan& plan, ConstTensorView grad_rows,
                                          TensorView grad_x) {
  return round(dispatcher.dispatch_backward(plan, grad_rows, sum_output(grad_x)), grad_x);
}

OwnedTensor LayerParts::collect_weights(const Plan& plan, ConstTensorView grad_row_weights) {
  OwnedTensor of_shards = dispatcher.collect_routes(plan, grad_row_weights);
  if (shard.etp == 1) return of_shards;
  OwnedTensor sums;
  run_agreed(group, [&] {
    sums = group.pool().take(of_shards.view.dtype, {plan.num_tokens(), config.router.top_k});
    sum_over_shards(of_shards.view, sums.view);
  });
  return sums;
}

ExpertsForwardArgs LayerParts::prepare_forward(const MoeForwardArgs& args, const Plan& plan,
                                               const DispatchResult& sent, OwnedTensor& y) {
  y = dispatcher.allocate_rows(plan, result_dtype());
  return {.weights = shard_weights(args.weights.experts),
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
  rows.grad_rows = dispatcher.allocate_rows(plan, result_dtype());
  rows.grad_row_weights = group.pool().take(weight_dtype, {plan.num_rows()});
  return {.weights = shard_weights(args.weights.experts),
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
