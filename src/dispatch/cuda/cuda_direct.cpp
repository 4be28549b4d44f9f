#include "dispatch/cuda/cuda_direct.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/cuda/input_check.hpp"
#include "dispatch/cuda/pull_sum.hpp"
#include "dispatch/cuda/push_gradients.hpp"
#include "dispatch/cuda/put.hpp"
#include "dispatch/cuda/route_values.hpp"

namespace crossdock::cuda {
namespace {

const CudaPlan& device_plan(const Plan& plan) {
  return static_cast<const CudaPlan&>(*plan.device_data());
}

PutPart put_part(const ConstTensorView& tokens, const TensorView& rows) {
  PutPart part{};
  part.tokens = static_cast<const std::byte*>(tokens.data);
  part.row_bytes = rows.row_bytes();
  return part;
}

}  // namespace

CudaDirect::CudaDirect(DevicePathContext context, int device)
    : rank_(std::move(context), device, Waits::kForAll) {
  CROSSDOCK_CHECK(!rank_.config().partial_sums,
                  "partial_sums is not there on GPUs; rows are pulled and summed exactly");
  const DeviceGuard guard(device);
  load_plan();
  load_put();
  load_pull_sum();
  load_push_gradients();
  load_route_values();
}

// Rows that the library makes for a dispatch: the plan's own if they are still there and fit.
OwnedTensor CudaDirect::landing_rows(const Plan& plan, DType dtype, const Shape& shape,
                                     bool& is_ready) {
  const CudaPlan& arrays = device_plan(plan);
  const int64_t num_bytes = shape.num_elements() * size_of(dtype);
  is_ready = arrays.landing_bytes() >= num_bytes && num_bytes > 0;
  if (!is_ready) return rank_.take(dtype, shape);
  const Buffer landing = arrays.take_landing();
  return {.view = landing.view(dtype, shape), .owner = landing.owner()};
}

DispatchResult CudaDirect::dispatch(const Plan& plan, const DispatchArgs& args) {
  const DeviceGuard guard(rank_.device());
  DispatchResult result;
  std::vector<ShownMemory> shown;
  PutArgs put{};
  bool is_ready = false;
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    rank_.check_plan(plan);
    check_tokens(rank_, args, plan.num_tokens());
    const int64_t R = plan.capacity_rows();
    const Shape shape{R, rank_.config().width};
    result.rows = args.rows.given() ? rank_.output_or_new("rows", args.rows, args.x.dtype, shape)
                                    : landing_rows(plan, args.x.dtype, shape, is_ready);
    put.parts[put.num_parts++] = put_part(args.x, result.rows.view);
    shown.push_back(rank_.show(result.rows.view.data, result.rows.view.num_bytes(), false));
    if (args.scales.given()) {
      is_ready = false;
      result.row_scales = rank_.output_or_new("row_scales", args.row_scales, args.scales.dtype,
                                              {R, args.scales.shape[1]});
      put.parts[put.num_parts++] = put_part(args.scales, result.row_scales.view);
      shown.push_back(
          rank_.show(result.row_scales.view.data, result.row_scales.view.num_bytes(), false));
    }
    if (args.with_row_weights) {
      is_ready = false;
      result.row_weights = rank_.take(DType::kF32, {R});
      shown.push_back(
          rank_.show(result.row_weights.view.data, result.row_weights.view.num_bytes(), false));
    }
  });
  std::vector<MemoryHandle> handles;
  for (const ShownMemory& memory : shown) handles.push_back(memory.handle);
  const CudaRank::Met met = rank_.meet(
      {.operation = "dispatch",
       .plan = &plan,
       .call_text = concat("dtype=", name_of(args.x.dtype),
                           ";scales=", args.scales.given() ? name_of(args.scales.dtype) : "none",
                           ";row_weights=", args.with_row_weights),
       .handles = std::move(handles),
       .needs_barrier = !is_ready,
       .refusal = std::move(refusal)});
  const EventRecorder::Scope scope(rank_.group().recorder(), "dispatch", met.sequence);
  row_dtype_ = args.x.dtype;
  wants_landing_ = !args.rows.given();
  run_agreed(rank_.group(), [&] {
    const CudaPlan& arrays = device_plan(plan);
    put.targets = arrays.arrays().targets;
    put.T = arrays.inputs().T;
    put.K = arrays.shape().K;
    put.signals = rank_.signals();
    for (int i = 0; i < put.num_parts; ++i) {
      rank_.reach(met, static_cast<size_t>(i), put.parts[i].rows);
    }
    if (args.with_row_weights) {
      put.weights = arrays.arrays().weights;
      rank_.reach(met, static_cast<size_t>(put.num_parts), put.row_weights);
    }
    const auto zero_pads = [&](size_t entry, const TensorView& rows) {
      TensorView landed = rows;
      landed.data = shown[entry].data;
      rank_.zero_pads(arrays, landed);
    };
    size_t entry = 0;
    zero_pads(entry++, result.rows.view);
    if (args.scales.given()) zero_pads(entry++, result.row_scales.view);
    if (args.with_row_weights) zero_pads(entry++, result.row_weights.view);
    put.awaits_peers = met.needs_barrier && rank_.fits_with_peers();
    if (met.needs_barrier && !put.awaits_peers) {
      launch_barrier(rank_.signals(), Operation::kDispatch, rank_.stream());
    }
    launch_put(put, rank_.max_sms(), rank_.stream());
    rank_.fetch(shown[0], result.rows.view.data, result.rows.view.num_bytes());
    if (args.scales.given()) {
      rank_.fetch(shown[1], result.row_scales.view.data, result.row_scales.view.num_bytes());
    }
  });
  return result;
}

OwnedTensor CudaDirect::sum_rows(const char* operation, const Plan& plan,
                                 const GatherSumArgs& args) {
  const DeviceGuard guard(rank_.device());
  OwnedTensor out;
  ShownMemory shown;
  const bool weighted = args.weights.given();
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    rank_.check_plan(plan);
    rank_.check_tensor("rows", args.rows, {plan.capacity_rows(), rank_.config().width});
    check_rows_dtype("rows", args.rows);
    out = rank_.output_or_new("out", args.out, args.rows.dtype,
                              {plan.num_tokens(), rank_.config().width});
    shown = rank_.show(args.rows.data, args.rows.num_bytes(), true);
  });
  const CudaRank::Met met =
      rank_.meet({.operation = operation,
                  .plan = &plan,
                  .call_text = concat("dtype=", name_of(args.rows.dtype), ";weighted=", weighted),
                  .handles = {shown.handle},
                  .refusal = std::move(refusal)});
  const EventRecorder::Scope scope(rank_.group().recorder(), operation, met.sequence);
  run_agreed(rank_.group(), [&] {
    const CudaPlan& arrays = device_plan(plan);
    PullSumArgs pull{};
    pull.targets = arrays.arrays().targets;
    pull.weights = weighted ? arrays.arrays().weights : nullptr;
    pull.T = arrays.inputs().T;
    pull.K = arrays.shape().K;
    pull.D = static_cast<int32_t>(rank_.config().width);
    pull.dtype = args.rows.dtype;
    pull.out = static_cast<std::byte*>(out.view.data);
    pull.signals = rank_.signals();
    rank_.reach(met, 0, pull.rows);
    pull.num_sharing = rank_.num_sharing();
    pull.awaits_peers = rank_.fits_with_peers();
    if (!pull.awaits_peers) {
      launch_barrier(rank_.signals(), Operation::kCombine, rank_.stream());
    }
    launch_pull_sum(pull, rank_.max_sms(), rank_.stream());
  });
  return out;
}

CombineBackwardResult CudaDirect::combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                   ConstTensorView y) {
  const DeviceGuard guard(rank_.device());
  CombineBackwardResult result;
  ShownMemory shown_y;
  ShownMemory shown_grad;
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    rank_.check_plan(plan);
    const Shape shape{plan.capacity_rows(), rank_.config().width};
    check_gradients(rank_, plan, grad_out, y);
    result.grad_rows = rank_.take(y.dtype, shape);
    result.grad_weights = rank_.take(DType::kF32, {plan.num_tokens(), rank_.config().top_k});
    shown_y = rank_.show(y.data, y.num_bytes(), true);
    shown_grad = rank_.show(result.grad_rows.view.data, result.grad_rows.view.num_bytes(), false);
  });
  const CudaRank::Met met = rank_.meet({.operation = "combine_backward",
                                        .plan = &plan,
                                        .call_text = concat("dtype=", name_of(grad_out.dtype)),
                                        .handles = {shown_y.handle, shown_grad.handle},
                                        .refusal = std::move(refusal)});
  const EventRecorder::Scope scope(rank_.group().recorder(), "combine_backward", met.sequence);
  run_agreed(rank_.group(), [&] {
    const CudaPlan& arrays = device_plan(plan);
    PushGradientsArgs push{};
    push.targets = arrays.arrays().targets;
    push.weights = arrays.arrays().weights;
    push.T = arrays.inputs().T;
    push.K = arrays.shape().K;
    push.D = static_cast<int32_t>(rank_.config().width);
    push.dtype = y.dtype;
    push.grad_out = static_cast<const std::byte*>(grad_out.data);
    push.grad_weights = static_cast<float*>(result.grad_weights.view.data);
    push.signals = rank_.signals();
    rank_.reach(met, 0, push.y);
    rank_.reach(met, 1, push.grad_rows);
    rank_.zero_pads(arrays, result.grad_rows.view);
    launch_barrier(rank_.signals(), Operation::kCombineBackward, rank_.stream());
    launch_push_gradients(push, rank_.max_sms(), rank_.stream());
  });
  return result;
}

OwnedTensor CudaDirect::collect_routes(const Plan& plan, ConstTensorView rows) {
  const DeviceGuard guard(rank_.device());
  OwnedTensor routes;
  ShownMemory shown;
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    rank_.check_plan(plan);
    rank_.check_tensor("rows", rows, {plan.capacity_rows()});
    CROSSDOCK_CHECK(rows.dtype == DType::kF32, "rows on a GPU must be fp32, got ",
                    name_of(rows.dtype));
    routes = rank_.take(rows.dtype, {plan.num_tokens(), rank_.config().top_k});
    shown = rank_.show(rows.data, rows.num_bytes(), true);
  });
  const CudaRank::Met met = rank_.meet({.operation = "collect_routes",
                                        .plan = &plan,
                                        .call_text = concat("dtype=", name_of(rows.dtype)),
                                        .handles = {shown.handle},
                                        .refusal = std::move(refusal)});
  const EventRecorder::Scope scope(rank_.group().recorder(), "collect_routes", met.sequence);
  run_agreed(rank_.group(), [&] {
    RouteValuesArgs values{};
    values.targets = device_plan(plan).arrays().targets;
    values.num_routes = plan.num_tokens() * rank_.config().top_k;
    values.routes = static_cast<float*>(routes.view.data);
    values.signals = rank_.signals();
    rank_.reach(met, 0, values.rows);
    launch_barrier(rank_.signals(), Operation::kRouteValues, rank_.stream());
    launch_gather_routes(values, rank_.stream());
  });
  return routes;
}

OwnedTensor CudaDirect::allocate_rows(const Plan& plan, DType dtype) {
  const DeviceGuard guard(rank_.device());
  return rank_.take(dtype, {plan.capacity_rows(), rank_.config().width});
}

}  // namespace crossdock::cuda
