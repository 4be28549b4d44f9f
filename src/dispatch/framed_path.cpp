#include "dispatch/framed_path.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/dispatch_args.hpp"
#include "dispatch/host/peer_rows.hpp"

namespace crossdock {
FramedPath::FramedPath(PathContext context, const Traits& traits)
    : context_(std::move(context)), traits_(traits) {}

uint64_t FramedPath::run(const Call& call, const MakeReady& make_ready) {
  group().check();  // before taking memory: peers may still use memory of a failed call
  ReadyCall ready;
  const std::optional<Error> refusal = refusal_of([&] {
    check_usable();
    if (call.plan != nullptr) check_plan(context_, *call.plan);
    ready = make_ready();
  });
  const uint64_t sequence = agree(call, refusal);
  EventRecorder& recorder = group().recorder();
  const EventRecorder::Scope recorded(recorder, call.operation, sequence, ready.num_bytes);
  if (ready.copied_bytes > 0) {
    const EventRecorder::Scope copied(recorder, call.operation, sequence, ready.copied_bytes,
                                      kForeignCopy);
  }
  run_agreed(group(), [&] { ready.move(sequence); });
  return sequence;
}

uint64_t FramedPath::agree(const Call& call, const std::optional<Error>& refusal) {
  return group()
      .agree({.operation = call.operation,
              .subject = call.subject_id(),
              .config = call.text,
              .refusal = as_refusal(refusal)})
      .sequence;
}

void FramedPath::agree_on(const Proposal& proposal) {
  const Call call{.operation = proposal.operation,
                  .plan = nullptr,
                  .text = proposal.config,
                  .subject = proposal.subject};
  run(call, [&] {
    if (proposal.refusal != nullptr) throw Error(*proposal.refusal);
    return ready_agreement(proposal.operation);
  });
}

ReadyCall FramedPath::ready_agreement(const char* /*operation*/) {
  return {.move = [](uint64_t /*sequence*/) {}};
}

void FramedPath::agree_on_chunks(const Plan& plan) {
  group().agree({.operation = "dispatch", .subject = plan.id()});
}

OwnedTensor FramedPath::take_dispatch_rows(const Plan& plan, DType dtype) {
  return take_rows("dispatch", plan, dtype);
}

DispatchResult FramedPath::dispatch(const Plan& plan, const DispatchArgs& args) {
  DispatchResult result;
  const Call call{.operation = "dispatch",
                  .plan = &plan,
                  .text = call_text(args),
                  .must_meet = args.on_chunk != nullptr};
  run(call, [&] {
    check_args(plan, args, device());
    const int64_t R = plan.capacity_rows();
    result.rows = args.rows.given()
                      ? output_or_new("rows", args.rows, args.x.dtype, {R, config().width})
                      : take_dispatch_rows(plan, args.x.dtype);
    if (args.scales.given()) {
      result.row_scales = output_or_new("row_scales", args.row_scales, args.scales.dtype,
                                        {R, args.scales.shape[1]});
    }
    if (args.with_row_weights) {
      result.row_weights =
          output_or_new("row_weights", args.row_weights, plan.data().weight_dtype, {R});
    }
    return ready_dispatch(plan, args, result);
  });
  if (args.on_chunk && traits_.only_queues) {
    run_agreed(group(), [&] {
      args.on_chunk(result, {0, plan.num_local_experts()});
      agree_on_chunks(plan);
    });
  }
  return result;
}

OwnedTensor FramedPath::gather_sum(const char* operation, const Plan& plan,
                                   const GatherSumArgs& args) {
  OwnedTensor out;
  run({.operation = operation, .plan = &plan, .text = call_text(args)}, [&] {
    check_args(plan, args, device());
    out = output_or_new("out", args.out, args.rows.dtype, {plan.num_tokens(), config().width});
    return ready_gather_sum(operation, plan,
                            {.rows = args.rows, .weights = args.weights, .out = out.view});
  });
  return out;
}

CombineBackwardResult FramedPath::combine_backward(const Plan& plan,
                                                   const CombineBackwardArgs& args) {
  const ConstTensorView& grad_out = args.grad_out;
  const ConstTensorView& y = args.y;
  CombineBackwardResult result;
  run({.operation = "combine_backward", .plan = &plan, .text = call_text(args)}, [&] {
    check_args(plan, args, device());
    result.grad_rows = args.grad_rows.given()
                           ? output_or_new("grad_rows", args.grad_rows, y.dtype, y.shape)
                           : take_rows("combine_backward", plan, y.dtype);
    result.grad_weights = output_or_new("grad_weights", args.grad_weights, plan.data().weight_dtype,
                                        {plan.num_tokens(), plan.data().K});
    return ready_combine_backward(plan, {.grad_out = grad_out,
                                         .y = y,
                                         .grad_rows = result.grad_rows.view,
                                         .grad_weights = result.grad_weights.view});
  });
  return result;
}

OwnedTensor FramedPath::collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) {
  OwnedTensor result;
  run({.operation = "collect_routes", .plan = &plan, .text = call_text_of_routes(rows)}, [&] {
    check_collected(plan, rows, routes, device());
    result = output_or_new("routes", routes, rows.dtype, {plan.num_tokens(), plan.data().K});
    return ready_collect_routes(plan, rows, result.view);
  });
  return result;
}

}  // namespace crossdock
