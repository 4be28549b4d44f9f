#include "layer/layer_parts.hpp"

#include <span>
#include <utility>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "experts/shared_experts.hpp"
#include "layer/device_memory.hpp"

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
      dispatcher(make_dispatcher(group, config, options)) {
  for (Group* other : {options.counting_group, options.sequence_group, options.replicated_over}) {
    if (other != nullptr && other != &group) other_groups_.push_back(other);
  }
  set_device_options(options.device);
}

void LayerParts::set_device_options(const DeviceOptions& options) {
  device_options = options;
  device_options.stream = stream_of_calls(group, options.stream);
  for (Group* other : other_groups_) {
    device_options.stream = stream_of_calls(*other, device_options.stream);
  }
  device_options.run_ahead = options.run_ahead && !meets_elsewhere();
  stream = device_options.stream;
  dispatcher.set_device_options(device_options);
  are_experts_prepared_ = false;
}

void LayerParts::prepare_experts(Device gpu) {
  if (are_experts_prepared_) return;
  experts.prepare(gpu, stream);
  if (shared) shared->experts().prepare(gpu, stream);
  if (shard.etp > 1) load_device_shards(gpu);
  are_experts_prepared_ = true;
}

void LayerParts::check_gpu(Device gpu) const {
  CROSSDOCK_CHECK(!device_memory_ || gpu == gpu_, "x must be on GPU ", gpu_.index,
                  ", as in the first forward; it is on GPU ", gpu.index);
}

DeviceMemory& LayerParts::memory_of(Device gpu) {
  if (!device_memory_) {
    device_memory_ = make_device_memory(gpu);
    gpu_ = gpu;
  }
  return *device_memory_;
}

OwnedTensor LayerParts::take(Device device, DType dtype, const Shape& shape) {
  if (device.is_cpu()) return group.pool().take(dtype, shape);
  return memory_of(device).take(dtype, shape, stream);
}

SharedExperts::OnDevice LayerParts::on_device(const ConstTensorView& x, OwnedTensor& segment) {
  if (x.device.is_cpu()) return {};
  segment = take(x.device, DType::kI64, {3});
  // With a single chunk, the dispatch already has its SMs when the shared experts start.
  const bool leaves_sms = overlaps_shared() && overlaps_chunks();
  return {.stream = stream, .segment = segment.view, .free_sms = leaves_sms ? dispatch_sms() : 0};
}

Plan LayerParts::plan(const RouterOutput& routes) {
  if (shard.etp == 1) return dispatcher.plan(routes.routing());
  ShardedRoutes sharded;
  run_agreed(group, [&] {
    const Routing routing = routes.routing();
    sharded = routing.expert_ids.device.is_cpu() ? shard_routes(routing, shard.etp)
                                                 : shard_on_gpu(routing);
  });
  return dispatcher.plan(sharded.routing());
}

ShardedRoutes LayerParts::shard_on_gpu(const Routing& routing) {
  const ConstTensorView& ids = routing.expert_ids;
  const Shape shape{ids.num_rows(), ids.shape[1] * shard.etp};
  ShardedRoutes sharded{.expert_ids = take(ids.device, ids.dtype, shape),
                        .weights = take(ids.device, routing.weights.dtype, shape)};
  shard_routes_on_device(routing, sharded, stream);
  return sharded;
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
    if (!out.given()) {
      rounded = take(sums.view.device, config.experts.dtype, sums.view.shape);
    }
    round_sums(sums.view, rounded.view, *pool, stream);
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
    const Device device = of_shards.view.device;
    sums = take(device, of_shards.view.dtype, {plan.num_tokens(), config.router.top_k});
    if (device.is_cpu()) return sum_over_shards(of_shards.view, sums.view);
    sum_over_shards_on_device(of_shards.view, sums.view, stream);
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
          .y = y.view,
          .stream = stream};
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
  rows.grad_row_weights = take(plan.device(), weight_dtype, {plan.capacity_rows()});
  return {.weights = shard_weights(args.weights.experts),
          .rows = args.saved->sent.rows.view,
          .segments = plan.segments(),
          .row_weights = grad_y.row_weights.view,
          .grad_y = grad_y.rows.view,
          .saved = &args.saved->experts,
          .grad_rows = rows.grad_rows.view,
          .grad_row_weights = rows.grad_row_weights.view,
          .keep_for_dw = args.delay_dw || any_given(args.grads.experts),
          .stream = stream};
}

void LayerParts::backward_experts(const MoeBackwardArgs& args, BackwardRows& rows) {
  const ExpertsBackwardDxArgs dx = prepare_backward(args, args.saved->grad_y, rows);
  const EventRecorder::Scope scope(group.recorder(), "experts_dx", 0);
  experts.backward_dx(dx);
}

OwnedTensor LayerParts::forward_shared(const MoeForwardArgs& args, MoeSaved& saved) {
  if (!shared) return {};
  const EventRecorder::Scope scope(group.recorder(), "shared_experts", 0);
  OwnedTensor segment;
  OwnedTensor y = take(args.x.device, args.x.dtype, args.x.shape);
  saved.shared = shared->forward({.weights = args.weights.shared,
                                  .x = args.x,
                                  .y = y.view,
                                  .device = on_device(args.x, segment)});
  return y;
}

OwnedTensor LayerParts::backward_shared(const MoeBackwardArgs& args) {
  if (!shared) return {};
  const EventRecorder::Scope scope(group.recorder(), "shared_experts_dx", 0);
  OwnedTensor segment;
  OwnedTensor grad_x = take(args.x.device, args.x.dtype, args.x.shape);
  shared->backward_dx({.weights = args.weights.shared,
                       .x = args.x,
                       .grad_out = args.grad_out,
                       .saved = &args.saved->shared,
                       .grad_x = grad_x.view,
                       .device = on_device(args.x, segment)});
  return grad_x;
}

void LayerParts::backward_dw(const MoeBackwardDwArgs& args) {
  const MoeSaved& saved = *args.saved;
  const EventRecorder::Scope scope(group.recorder(), "experts_dw", 0);
  if (any_given(args.experts)) {
    experts.backward_dw({.rows = saved.sent.rows.view,
                         .segments = saved.decision.plan.segments(),
                         .row_weights = saved.grad_y.row_weights.view,
                         .grad_y = saved.grad_y.rows.view,
                         .saved = &saved.experts,
                         .grads = args.experts,
                         .accumulate = args.accumulate,
                         .stream = stream});
  }
  if (!shared || !any_given(args.shared)) return;
  OwnedTensor segment;
  shared->backward_dw({.x = args.x,
                       .grad_out = args.grad_out,
                       .saved = &saved.shared,
                       .grads = args.shared,
                       .accumulate = args.accumulate,
                       .device = on_device(args.x, segment)});
}

std::vector<int64_t> drops_of_experts(const Plan& plan, int64_t num_experts) {
  const std::span<const int64_t> of_shards = plan.dropped();
  const size_t etp = of_shards.size() / static_cast<size_t>(num_experts);
  std::vector<int64_t> drops;  // all shards of an expert drop the same routes
  for (size_t i = 0; i < of_shards.size(); i += etp) drops.push_back(of_shards[i]);
  return drops;
}

bool any_given(const ExpertGradients& grads) {
  return grads.w1.given() || grads.w2.given() || grads.b1.given() || grads.b2.given();
}

}  // namespace crossdock
