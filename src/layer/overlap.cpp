#include "layer/overlap.hpp"

#include <optional>
#include <utility>

#include "comm/agreed_failure.hpp"
#include "layer/background_work.hpp"

namespace crossdock {

bool Overlap::is_requested(const MoeLayerConfig& config) {
  return config.overlap_chunks > 1 || (config.shared_inner > 0 && config.overlap_shared);
}

ForwardRows Overlap::forward(const MoeForwardArgs& args, MoeSaved& saved) {
  const Plan& plan = saved.decision.plan;
  ForwardRows rows;
  ExpertsForwardArgs experts;
  BackgroundWork work(worker_);  // last: its destructor waits for tasks that use the above

  const auto compute_shared = [&] { rows.shared_y = parts_.forward_shared(args, saved); };
  const auto compute_chunk = [&](const DispatchResult& sent, const DispatchChunk& chunk) {
    if (!rows.y.view.given()) {
      experts = parts_.prepare_forward(args, plan, sent, rows.y);
      saved.experts = parts_.experts.begin_forward(experts);
    }
    work.add([&, sent, chunk] {  // the copy of `sent` keeps the rows if the dispatch fails
      const EventRecorder::Scope scope(parts_.group.recorder(), "experts", 0);
      parts_.experts.forward_part(experts, saved.experts, {chunk.first_expert, chunk.last_expert});
    });
  };

  if (parts_.overlaps_shared()) run_agreed(parts_.group, [&] { work.add(compute_shared); });
  DispatchArgs dispatch{.x = args.x,
                        .with_row_weights = parts_.weights_in_experts(),
                        .num_chunks = parts_.config.overlap_chunks};
  if (parts_.overlaps_chunks()) dispatch.on_chunk = compute_chunk;
  saved.sent = parts_.dispatcher.dispatch(plan, dispatch);
  run_agreed(parts_.group, [&] {
    if (!parts_.overlaps_shared()) compute_shared();
    work.finish();
    if (!parts_.overlaps_chunks()) rows.y = parts_.forward_experts(args, saved);
  });
  return rows;
}

BackwardRows Overlap::backward(const MoeBackwardArgs& args) {
  MoeSaved& saved = *args.saved;
  BackwardRows rows;
  ExpertsBackwardDxArgs dx;
  BackgroundWork work(worker_);  // last: its destructor waits for tasks that use the above

  const auto compute_shared = [&] { rows.shared_grad_x = parts_.backward_shared(args); };
  const auto compute_chunk = [&](const DispatchResult& grad_y, const DispatchChunk& chunk) {
    if (!rows.grad_rows.view.given()) {
      dx = parts_.prepare_backward(args, grad_y, rows);
      parts_.experts.begin_backward_dx(dx);
    }
    work.add([&, grad_y, chunk] {  // the copy of `grad_y` keeps the rows if the dispatch fails
      const EventRecorder::Scope scope(parts_.group.recorder(), "experts_dx", 0);
      parts_.experts.backward_dx_part(dx, {chunk.first_expert, chunk.last_expert});
    });
  };

  if (parts_.overlaps_shared()) run_agreed(parts_.group, [&] { work.add(compute_shared); });
  DispatchArgs dispatch{
      .x = args.grad_out, .with_row_weights = true, .num_chunks = parts_.config.overlap_chunks};
  if (parts_.overlaps_chunks()) dispatch.on_chunk = compute_chunk;
  saved.grad_y = parts_.dispatcher.dispatch(saved.decision.plan, dispatch);
  run_agreed(parts_.group, [&] {
    if (!parts_.overlaps_shared()) compute_shared();
    work.finish();
    if (parts_.overlaps_chunks()) {
      parts_.experts.finish_backward_dx(dx);
    } else {
      parts_.backward_experts(args, rows);
    }
  });
  return rows;
}

namespace {

// Number of SMs that the experts of a chunk leave free for the dispatch of later chunks.
int free_sms_beside(const LayerParts& parts, const Plan& plan, const DispatchChunk& chunk) {
  const bool is_last = chunk.last_expert == plan.num_local_experts();
  return is_last ? 0 : parts.dispatch_sms();
}

}  // namespace

ForwardRows forward_beside_dispatch(LayerParts& parts, const MoeForwardArgs& args,
                                    MoeSaved& saved) {
  const Plan& plan = saved.decision.plan;
  ForwardRows rows;
  Pending<DispatchResult> pending =
      parts.dispatcher.begin_dispatch(plan, {.x = args.x,
                                             .with_row_weights = parts.weights_in_experts(),
                                             .num_chunks = parts.config.overlap_chunks});
  run_agreed(parts.group, [&] {
    if (parts.overlaps_shared()) rows.shared_y = parts.forward_shared(args, saved);
    ExpertsForwardArgs experts = parts.prepare_forward(args, plan, pending.result(), rows.y);
    saved.experts = parts.experts.begin_forward(experts);
    while (const std::optional<DispatchChunk> chunk = parts.dispatcher.next_chunk(pending)) {
      const EventRecorder::Scope scope(parts.group.recorder(), "experts", 0);
      experts.free_sms = free_sms_beside(parts, plan, *chunk);
      parts.experts.forward_part(experts, saved.experts, {chunk->first_expert, chunk->last_expert});
    }
    saved.sent = parts.dispatcher.finish(std::move(pending));
    if (!parts.overlaps_shared()) rows.shared_y = parts.forward_shared(args, saved);
  });
  return rows;
}

BackwardRows backward_beside_dispatch(LayerParts& parts, const MoeBackwardArgs& args) {
  MoeSaved& saved = *args.saved;
  const Plan& plan = saved.decision.plan;
  BackwardRows rows;
  Pending<DispatchResult> pending = parts.dispatcher.begin_dispatch(
      plan,
      {.x = args.grad_out, .with_row_weights = true, .num_chunks = parts.config.overlap_chunks});
  run_agreed(parts.group, [&] {
    if (parts.overlaps_shared()) rows.shared_grad_x = parts.backward_shared(args);
    ExpertsBackwardDxArgs dx = parts.prepare_backward(args, pending.result(), rows);
    parts.experts.begin_backward_dx(dx);
    while (const std::optional<DispatchChunk> chunk = parts.dispatcher.next_chunk(pending)) {
      const EventRecorder::Scope scope(parts.group.recorder(), "experts_dx", 0);
      dx.free_sms = free_sms_beside(parts, plan, *chunk);
      parts.experts.backward_dx_part(dx, {chunk->first_expert, chunk->last_expert});
    }
    parts.experts.finish_backward_dx(dx);
    saved.grad_y = parts.dispatcher.finish(std::move(pending));
    if (!parts.overlaps_shared()) rows.shared_grad_x = parts.backward_shared(args);
  });
  return rows;
}

}  // namespace crossdock
