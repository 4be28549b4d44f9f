#include "layer/overlap.hpp"

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

  if (overlaps_shared()) run_agreed(parts_.group, [&] { work.add(compute_shared); });
  DispatchArgs dispatch{.x = args.x,
                        .with_row_weights = parts_.weights_in_experts(),
                        .num_chunks = parts_.config.overlap_chunks};
  if (overlaps_chunks()) dispatch.on_chunk = compute_chunk;
  saved.sent = parts_.dispatcher.dispatch(plan, dispatch);
  run_agreed(parts_.group, [&] {
    if (!overlaps_shared()) compute_shared();
    work.finish();
    if (!overlaps_chunks()) rows.y = parts_.forward_experts(args, saved);
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

  if (overlaps_shared()) run_agreed(parts_.group, [&] { work.add(compute_shared); });
  DispatchArgs dispatch{
      .x = args.grad_out, .with_row_weights = true, .num_chunks = parts_.config.overlap_chunks};
  if (overlaps_chunks()) dispatch.on_chunk = compute_chunk;
  saved.grad_y = parts_.dispatcher.dispatch(saved.decision.plan, dispatch);
  run_agreed(parts_.group, [&] {
    if (!overlaps_shared()) compute_shared();
    work.finish();
    if (overlaps_chunks()) {
      parts_.experts.finish_backward_dx(dx);
    } else {
      parts_.backward_experts(args, rows);
    }
  });
  return rows;
}

ForwardRows forward_beside_dispatch(LayerParts& parts, const MoeForwardArgs& args,
                                    MoeSaved& saved) {
  ForwardRows rows;
  Pending<DispatchResult> pending = parts.dispatcher.begin_dispatch(
      saved.decision.plan, {.x = args.x, .with_row_weights = parts.weights_in_experts()});
  run_agreed(parts.group, [&] {
    rows.shared_y = parts.forward_shared(args, saved);
    saved.sent = parts.dispatcher.finish(std::move(pending));
    rows.y = parts.forward_experts(args, saved);
  });
  return rows;
}

BackwardRows backward_beside_dispatch(LayerParts& parts, const MoeBackwardArgs& args) {
  MoeSaved& saved = *args.saved;
  BackwardRows rows;
  Pending<DispatchResult> pending = parts.dispatcher.begin_dispatch(
      saved.decision.plan, {.x = args.grad_out, .with_row_weights = true});
  run_agreed(parts.group, [&] {
    rows.shared_grad_x = parts.backward_shared(args);
    saved.grad_y = parts.dispatcher.finish(std::move(pending));
    parts.backward_experts(args, rows);
  });
  return rows;
}

}  // namespace crossdock
