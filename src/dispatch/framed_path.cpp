#include "dispatch/framed_path.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/dispatch_args.hpp"
#include "dispatch/host/peer_rows.hpp"

namespace crossdock {
namespace {

std::string dtype_text(DType dtype) {
  return std::string("dtype=").append(name_of(dtype));
}

// Weights must be fp64 with fp64 rows, and fp32 otherwise.
void check_weight_dtype(const Plan& plan, DType row_dtype) {
  const DType wanted = row_dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  CROSSDOCK_CHECK(plan.data().weight_dtype == wanted, "weights must be ", name_of(wanted),
                  " with rows of ", name_of(row_dtype), "; the plan was made with ",
                  name_of(plan.data().weight_dtype));
}

}  // namespace

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

void FramedPath::check_summable(const char* name, const ConstTensorView& rows) const {
  const bool is_wide = rows.dtype == DType::kF64;
  CROSSDOCK_CHECK(is_summable(rows.dtype) && (traits_.takes_fp64 || !is_wide), name, traits_.where,
                  " must be ", traits_.takes_fp64 ? "fp64, " : "", "fp32, bf16 or fp16, got ",
                  name_of(rows.dtype));
}

void FramedPath::check_tokens(const Plan& plan, const DispatchArgs& args) const {
  const DType dtype = args.x.dtype;
  check_tensor("x", args.x, {plan.num_tokens(), config().width});
  const bool is_known = is_summable(dtype) || dtype == DType::kF8E4M3;
  CROSSDOCK_CHECK(is_known && (traits_.takes_fp64 || dtype != DType::kF64), "x", traits_.where,
                  " must be ", traits_.takes_fp64 ? "fp64, " : "",
                  "fp32, bf16, fp16 or fp8_e4m3, got ", name_of(dtype));
  if (const auto scales_shape = check_args(args, plan.num_tokens(), config().width)) {
    check_tensor("scales", args.scales, *scales_shape);
  }
}

DispatchResult FramedPath::dispatch(const Plan& plan, const DispatchArgs& args) {
  DispatchResult result;
  const Call call{.operation = "dispatch",
                  .plan = &plan,
                  .text = call_text(args),
                  .must_meet = args.on_chunk != nullptr};
  run(call, [&] {
    check_tokens(plan, args);
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
  const bool weighted = args.weights.given();
  std::string text = dtype_text(args.rows.dtype);
  text += weighted ? ";weighted=1" : ";weighted=0";
  run({.operation = operation, .plan = &plan, .text = std::move(text)}, [&] {
    check_tensor("rows", args.rows, {plan.capacity_rows(), config().width});
    check_summable("rows", args.rows);
    if (weighted) check_weight_dtype(plan, args.rows.dtype);
    check_outputs(args);
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
  std::string text = dtype_text(grad_out.dtype);
  run({.operation = "combine_backward", .plan = &plan, .text = std::move(text)}, [&] {
    check_tensor("grad_out", grad_out, {plan.num_tokens(), config().width});
    check_tensor("y", y, {plan.capacity_rows(), config().width});
    check_summable("grad_out", grad_out);
    CROSSDOCK_CHECK(y.dtype == grad_out.dtype, "y and grad_out must have the same dtype, got ",
                    name_of(y.dtype), " and ", name_of(grad_out.dtype));
    check_weight_dtype(plan, y.dtype);
    check_outputs(args);
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
  std::string text = dtype_text(rows.dtype);
  run({.operation = "collect_routes", .plan = &plan, .text = std::move(text)}, [&] {
    check_tensor("rows", rows, {plan.capacity_rows()});
    const bool is_wide = rows.dtype == DType::kF64;
    CROSSDOCK_CHECK(rows.dtype == DType::kF32 || (traits_.takes_fp64 && is_wide), "rows",
                    traits_.where, " must be ", traits_.takes_fp64 ? "fp32 or fp64" : "fp32",
                    ", got ", name_of(rows.dtype));
    check_collected(rows, routes);
    result = output_or_new("routes", routes, rows.dtype, {plan.num_tokens(), plan.data().K});
    return ready_collect_routes(plan, rows, result.view);
  });
  return result;
}

}  // namespace crossdock
