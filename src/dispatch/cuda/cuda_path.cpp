#include "dispatch/cuda/cuda_path.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/host_routing.hpp"
#include "dispatch/cuda/input_check.hpp"
#include "dispatch/dispatch_args.hpp"
#include "dispatch/host/peer_rows.hpp"

namespace crossdock::cuda {

CudaPath::CudaPath(DevicePathContext context, int device, Waits waits)
    : rank_(std::move(context), device, waits) {
  CROSSDOCK_CHECK(!rank_.config().partial_sums,
                  "partial_sums is not there on GPUs; rows are pulled and summed exactly");
}

uint64_t CudaPath::run(Call call, const std::function<ReadyCall()>& make_ready) {
  const CudaRank::CallScope scope(rank_);
  ReadyCall ready;
  rank_.take_copied_bytes();  // of a call that was refused
  std::optional<Error> refusal = refusal_of([&] {
    rank_.check_usable();
    rank_.follow_caller();
    if (call.plan != nullptr) rank_.check_plan(*call.plan);
    ready = make_ready();
  });
  const CudaRank::Met met = rank_.meet({.operation = call.operation,
                                        .plan = call.plan,
                                        .call_text = std::move(call.text),
                                        .handles = std::move(ready.handles),
                                        .needs_barrier = ready.needs_barrier,
                                        .refusal = std::move(refusal)});
  const EventRecorder::Scope recorded(rank_.group().recorder(), call.operation, met.sequence);
  if (const int64_t bytes = rank_.take_copied_bytes(); bytes > 0) {
    const EventRecorder::Scope copied(rank_.group().recorder(), call.operation, met.sequence, bytes,
                                      kForeignCopy);
  }
  run_agreed(rank_.group(), [&] { ready.queue(met); });
  return met.sequence;
}

Plan CudaPath::plan(const Routing& routing, const PlanOnHost& plan) {
  const CudaRank::CallScope scope(rank_);
  return plan_on_host(rank_, routing, plan, [&](const Plan& made) { return upload(made); });
}

Plan CudaPath::plan(const DenseRouting& routing, const PlanDenseOnHost& plan) {
  const CudaRank::CallScope scope(rank_);
  return plan_on_host(rank_, routing, plan, [&](const Plan& made) { return upload(made); });
}

CudaPath::TakenRows CudaPath::take_rows(const Plan& plan, DType dtype) {
  return {.rows = allocate_rows(plan, dtype)};
}

DispatchResult CudaPath::dispatch(const Plan& plan, const DispatchArgs& args) {
  DispatchResult result;
  run({.operation = "dispatch", .plan = &plan, .text = call_text(args)}, [&] {
    check_tokens(rank_, args, plan.num_tokens());
    const int64_t R = plan.capacity_rows();
    const Shape shape{R, rank_.config().width};
    TakenRows taken =
        args.rows.given()
            ? TakenRows{.rows = rank_.output_or_new("rows", args.rows, args.x.dtype, shape)}
            : take_rows(plan, args.x.dtype);
    result.rows = std::move(taken.rows);
    if (args.scales.given()) {
      result.row_scales = rank_.output_or_new("row_scales", args.row_scales, args.scales.dtype,
                                              {R, args.scales.shape[1]});
    }
    if (args.with_row_weights) result.row_weights = rank_.take(DType::kF32, {R});
    ReadyCall ready = ready_dispatch(plan, args, result);
    ready.needs_barrier = !taken.is_free || args.scales.given() || args.with_row_weights;
    return ready;
  });
  return result;
}

OwnedTensor CudaPath::sum_rows(const char* operation, const Plan& plan, const GatherSumArgs& args) {
  OwnedTensor out;
  std::string text = concat("dtype=", name_of(args.rows.dtype), ";weighted=", args.weights.given());
  run({.operation = operation, .plan = &plan, .text = std::move(text)}, [&] {
    const int64_t D = rank_.config().width;
    rank_.check_tensor("rows", args.rows, {plan.capacity_rows(), D});
    check_rows_dtype("rows", args.rows);
    check_outputs(args);
    out = rank_.output_or_new("out", args.out, args.rows.dtype, {plan.num_tokens(), D});
    return ready_sum(operation_of_sum(operation), plan,
                     {.rows = args.rows, .weights = args.weights, .out = out.view});
  });
  return out;
}

CombineBackwardResult CudaPath::combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                 ConstTensorView y) {
  CombineBackwardResult result;
  std::string text = concat("dtype=", name_of(grad_out.dtype));
  run({.operation = "combine_backward", .plan = &plan, .text = std::move(text)}, [&] {
    check_gradients(rank_, plan, grad_out, y);
    result.grad_rows = rank_.take(y.dtype, y.shape);
    result.grad_weights = rank_.take(DType::kF32, {plan.num_tokens(), rank_.config().top_k});
    return ready_gradients(plan, {.grad_out = grad_out,
                                  .y = y,
                                  .grad_rows = result.grad_rows.view,
                                  .grad_weights = result.grad_weights.view});
  });
  return result;
}

OwnedTensor CudaPath::collect_routes(const Plan& plan, ConstTensorView rows) {
  OwnedTensor routes;
  std::string text = concat("dtype=", name_of(rows.dtype));
  run({.operation = "collect_routes", .plan = &plan, .text = std::move(text)}, [&] {
    rank_.check_tensor("rows", rows, {plan.capacity_rows()});
    CROSSDOCK_CHECK(rows.dtype == DType::kF32, "rows on a GPU must be fp32, got ",
                    name_of(rows.dtype));
    routes = rank_.take(rows.dtype, {plan.num_tokens(), rank_.config().top_k});
    return ready_routes(plan, rows, routes.view);
  });
  return routes;
}

OwnedTensor CudaPath::allocate_rows(const Plan& plan, DType dtype) {
  const CudaRank::CallScope scope(rank_);
  rank_.group().check();  // a late peer may still write memory that a failed call has given back
  rank_.follow_caller();
  return rank_.take(dtype, {plan.capacity_rows(), rank_.config().width});
}

PullSumArgs CudaPath::sum_args(Operation operation, const Plan& plan,
                               const GatherSumArgs& args) const {
  const CudaPlan& arrays = device_plan(plan);
  PullSumArgs sum{};
  sum.weights = args.weights.given() ? arrays.arrays().weights : nullptr;
  sum.T = plan.num_tokens();
  sum.K = arrays.shape().K;
  sum.D = static_cast<int32_t>(rank_.config().width);
  sum.dtype = args.rows.dtype;
  sum.out = static_cast<std::byte*>(args.out.data);
  sum.operation = operation;
  return sum;
}

}  // namespace crossdock::cuda
