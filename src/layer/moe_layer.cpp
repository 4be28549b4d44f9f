#include "crossdock/moe_layer.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "experts/shared_experts.hpp"
#include "layer/aliasing.hpp"
#include "layer/chunk_pipeline.hpp"
#include "layer/layer_config.hpp"
#include "layer/worker.hpp"

namespace crossdock {
namespace {

bool any_given(const ExpertGradients& grads) {
  return grads.w1.given() || grads.w2.given() || grads.b1.given() || grads.b2.given();
}

// Work of this rank alone, recorded; a failure is told to the peers, who wait for what follows.
template <typename Work>
void compute(Group& group, const char* operation, const Work& work) {
  run_agreed(group, [&] {
    const EventRecorder::Scope scope(group.recorder(), operation, 0);
    work();
  });
}

// Runs `exchange`, which uses the group, and beside it `local`, which does not: on the worker, or
// without one afterwards.
template <typename Local, typename Exchange>
void run_both(Group& group, Worker* worker, const Local& local, const Exchange& exchange) {
  ChunkPipeline aside(worker);
  run_agreed(group, [&] { aside.add(local); });
  exchange();
  run_agreed(group, [&] { aside.finish(); });
}

}  // namespace

MoeLayer::MoeLayer(Group& group, MoeLayerConfig config, MoeLayerOptions options)
    : group_(group), config_(std::move(config)), counting_group_(options.counting_group) {
  // Throwing here would leave the other ranks waiting: what is wrong is refused at the first call,
  // by all ranks alike.
  flaw_ = refusal_of([&] { build(options); });
}

MoeLayer::~MoeLayer() = default;

void MoeLayer::build(MoeLayerOptions& options) {
  config_ = fill_in(std::move(config_), group_);
  config_text_ = config_text(config_);
  if (!options.pool) options.pool = group_.threads();
  router_ = std::make_unique<Router>(config_.router, options.pool);
  experts_ = std::make_unique<Experts>(config_.experts, options.pool);
  if (config_.shared_inner > 0) {
    ExpertsConfig shared = config_.experts;
    shared.inner = config_.shared_inner;
    shared_ = std::make_unique<SharedExperts>(shared, options.pool);
  }
  dispatcher_ =
      options.strategy
          ? std::make_unique<Dispatcher>(group_, config_.dispatch, std::move(options.strategy))
          : std::make_unique<Dispatcher>(group_, config_.dispatch, config_.strategy);
}

MoeForwardResult MoeLayer::forward(const MoeForwardArgs& args) {
  MoeForwardResult result;
  MoeSaved& saved = result.saved;
  saved.decision = decide(args);  // the router decides, the plan counts
  const Plan& plan = saved.decision.plan;
  const bool weights_in_experts = config_.experts.weights_in == WeightsIn::kExperts;

  // Rows move out, all at once or in chunks; the experts compute with those that have landed, and
  // the shared experts, which need no rows, beside it.
  OwnedTensor shared_y;  // [T, D]
  OwnedTensor y;         // [R, D]
  ChunkPipeline pipeline(overlaps_chunks() ? worker_.get() : nullptr);
  const auto on_chunk = [&](const DispatchResult& sent, const DispatchChunk& chunk) {
    const bool is_first = !y.view.given();
    if (is_first) y = dispatcher_->allocate_rows(plan, args.x.dtype);
    const ExpertsForwardArgs rows{.weights = args.weights.experts,
                                  .rows = sent.rows.view,
                                  .segments = plan.segments(),
                                  .row_weights = sent.row_weights.view,
                                  .y = y.view};
    if (is_first) saved.experts = experts_->begin_forward(rows);
    pipeline.add([this, &saved, rows, sent, chunk] {  // `sent` keeps the rows, whatever happens
      const EventRecorder::Scope scope(group_.recorder(), "experts", 0);
      experts_->forward_part(rows, saved.experts, {chunk.first_expert, chunk.last_expert});
    });
  };
  run_both(
      group_, overlaps_shared() ? worker_.get() : nullptr,
      [&] { shared_y = forward_shared(args, saved); },
      [&] {
        saved.sent = dispatcher_->dispatch(plan, {.x = args.x,
                                                  .with_row_weights = weights_in_experts,
                                                  .num_chunks = config_.overlap_chunks,
                                                  .on_chunk = on_chunk});
      });
  run_agreed(group_, [&] { pipeline.finish(); });

  // The results move back.
  result.out = weights_in_experts ? dispatcher_->combine_unweighted(plan, y.view, args.out)
                                  : dispatcher_->combine(plan, y.view, args.out);
  if (shared_) compute(group_, "add_shared", [&] { shared_->add(shared_y.view, result.out.view); });
  return result;
}

OwnedTensor MoeLayer::backward(const MoeBackwardArgs& args) {
  agree_on_backward(args);
  MoeSaved& saved = *args.saved;
  const MoeDecision& decision = saved.decision;
  const Plan& plan = decision.plan;

  // Backward of the combine: grad_out goes to the rows, the experts apply the weights.
  OwnedTensor shared_grad_x;     // [T, D]
  OwnedTensor grad_rows;         // [R, D]
  OwnedTensor grad_row_weights;  // [R]
  ExpertsBackwardDxArgs dx;
  ChunkPipeline pipeline(overlaps_chunks() ? worker_.get() : nullptr);
  const auto on_chunk = [&](const DispatchResult& sent, const DispatchChunk& chunk) {
    if (!grad_rows.view.given()) {
      grad_rows = dispatcher_->allocate_rows(plan, args.x.dtype);
      grad_row_weights = group_.pool().take(decision.router->weight_dtype, {plan.num_rows()});
      dx = {.weights = args.weights.experts,
            .rows = saved.sent.rows.view,
            .segments = plan.segments(),
            .row_weights = sent.row_weights.view,
            .grad_y = sent.rows.view,
            .saved = &saved.experts,
            .grad_rows = grad_rows.view,
            .grad_row_weights = grad_row_weights.view,
            .keep_for_dw = args.delay_dw || any_given(args.grads.experts)};
      experts_->begin_backward_dx(dx);
    }
    pipeline.add([this, &dx, sent, chunk] {  // `sent` keeps the rows, whatever happens
      const EventRecorder::Scope scope(group_.recorder(), "experts_dx", 0);
      experts_->backward_dx_part(dx, {chunk.first_expert, chunk.last_expert});
    });
  };
  run_both(
      group_, overlaps_shared() ? worker_.get() : nullptr,
      [&] { shared_grad_x = backward_shared(args); },
      [&] {
        saved.grad_y = dispatcher_->dispatch(plan, {.x = args.grad_out,
                                                    .with_row_weights = true,
                                                    .num_chunks = config_.overlap_chunks,
                                                    .on_chunk = on_chunk});
      });
  run_agreed(group_, [&] {
    pipeline.finish();
    experts_->finish_backward_dx(dx);
  });

  // Backward of the dispatch; what the experts know of the weights goes home to the router.
  OwnedTensor grad_x = dispatcher_->dispatch_backward(plan, grad_rows.view, args.grad_x);
  const OwnedTensor grad_weights = dispatcher_->collect_routes(plan, grad_row_weights.view);
  compute(group_, "router_backward", [&] {
    router_->backward({.x = args.x,
                       .gate = args.weights.gate,
                       .output = decision.router.get(),
                       .grad_weights = grad_weights.view,
                       .counts = decision.loss_counts(),
                       .grad_losses = args.grad_losses,
                       .grad_x = grad_x.view,
                       .accumulate_x = true,
                       .grad_gate = args.grads.gate,
                       .grad_bias = args.grads.gate_bias,
                       .accumulate_gate = args.accumulate,
                       .grad_logits = {}});
    if (shared_) shared_->add(shared_grad_x.view, grad_x.view);
  });
  if (!args.delay_dw) finish_backward(args);
  return grad_x;
}

void MoeLayer::backward_dw(const MoeBackwardDwArgs& args) const {
  CROSSDOCK_CHECK(args.saved != nullptr && args.saved->grad_y.rows.view.given(),
                  "saved must be what a backward with delay_dw left");
  check_outputs(args);
  const MoeSaved& saved = *args.saved;
  const EventRecorder::Scope scope(group_.recorder(), "experts_dw", 0);
  if (any_given(args.experts)) {
    experts_->backward_dw({.rows = saved.sent.rows.view,
                           .segments = saved.decision.plan.segments(),
                           .row_weights = saved.grad_y.row_weights.view,
                           .grad_y = saved.grad_y.rows.view,
                           .saved = &saved.experts,
                           .grads = args.experts,
                           .accumulate = args.accumulate});
  }
  if (shared_ && any_given(args.shared)) {
    shared_->backward_dw({.x = args.x,
                          .grad_out = args.grad_out,
                          .saved = &saved.shared,
                          .grads = args.shared,
                          .accumulate = args.accumulate});
  }
}

void MoeLayer::finish_backward(const MoeBackwardArgs& args) {
  MoeSaved& saved = *args.saved;
  run_agreed(group_, [&] {
    backward_dw({.x = args.x,
                 .grad_out = args.grad_out,
                 .saved = &saved,
                 .experts = args.grads.experts,
                 .shared = args.grads.shared,
                 .accumulate = args.accumulate});
  });
  saved = {.decision = std::move(saved.decision)};
}

// Before ranks agree on a call: a rank that cannot have the thread refuses it.
void MoeLayer::start_worker() {
  if (!worker_ && (overlaps_shared() || overlaps_chunks())) worker_ = std::make_unique<Worker>();
}

bool MoeLayer::overlaps_chunks() const {
  return config_.overlap_chunks > 1;
}

bool MoeLayer::overlaps_shared() const {
  return shared_ != nullptr && config_.overlap_shared;
}

OwnedTensor MoeLayer::forward_shared(const MoeForwardArgs& args, MoeSaved& saved) {
  if (!shared_) return {};
  const EventRecorder::Scope scope(group_.recorder(), "shared_experts", 0);
  OwnedTensor y = group_.pool().take(args.x.dtype, args.x.shape);
  saved.shared = shared_->forward(args.weights.shared, args.x, y.view);
  return y;
}

OwnedTensor MoeLayer::backward_shared(const MoeBackwardArgs& args) {
  if (!shared_) return {};
  const EventRecorder::Scope scope(group_.recorder(), "shared_experts_dx", 0);
  OwnedTensor grad_x = group_.pool().take(args.x.dtype, args.x.shape);
  shared_->backward_dx({.weights = args.weights.shared,
                        .x = args.x,
                        .grad_out = args.grad_out,
                        .saved = &args.saved->shared,
                        .grad_x = grad_x.view});
  return grad_x;
}

}  // namespace crossdock
