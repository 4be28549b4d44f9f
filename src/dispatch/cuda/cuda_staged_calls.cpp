#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/cuda/cuda_staged.hpp"
#include "dispatch/cuda/input_check.hpp"
#include "dispatch/cuda/move_rows.hpp"
#include "dispatch/cuda/pull_sum.hpp"
#include "dispatch/cuda/push_gradients.hpp"

namespace crossdock::cuda {
namespace {

const CudaPlan& device_plan(const Plan& plan) {
  return static_cast<const CudaPlan&>(*plan.device_data());
}

void zero(const TensorView& tensor, cudaStream_t stream) {
  if (tensor.num_bytes() == 0) return;
  CROSSDOCK_CUDA(cudaMemsetAsync(tensor.data, 0, static_cast<size_t>(tensor.num_bytes()), stream));
}

}  // namespace

DispatchResult CudaStaged::dispatch(const Plan& plan, const DispatchArgs& args) {
  const DeviceGuard guard(rank_.device());
  DispatchResult result;
  std::vector<Journey> journeys;
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    rank_.check_plan(plan);
    check_tokens(rank_, args, plan.num_tokens());
    const int64_t R = plan.capacity_rows();
    result.rows = rank_.output_or_new("rows", args.rows, args.x.dtype, {R, rank_.config().width});
    journeys.push_back(tokens_to_rows(plan, args.x, result.rows.view));
    if (args.scales.given()) {
      result.row_scales = rank_.output_or_new("row_scales", args.row_scales, args.scales.dtype,
                                              {R, args.scales.shape[1]});
      journeys.push_back(tokens_to_rows(plan, args.scales, result.row_scales.view));
    }
    if (args.with_row_weights) {
      result.row_weights = rank_.take(DType::kF32, {R});
      journeys.push_back(routes_to_rows(plan, plan.weights(), result.row_weights.view));
    }
    for (Journey& journey : journeys) prepare(journey);
  });
  const std::string call_text =
      concat("dtype=", name_of(args.x.dtype),
             ";scales=", args.scales.given() ? name_of(args.scales.dtype) : "none",
             ";row_weights=", args.with_row_weights);
  const CudaRank::Met met = meet("dispatch", plan, call_text, journeys, std::move(refusal));
  const EventRecorder::Scope scope(rank_.group().recorder(), "dispatch", met.sequence);
  run_agreed(rank_.group(), [&] {
    size_t journey = 0;
    zero_pads(plan, result.rows.view, journeys[journey++]);
    if (args.scales.given()) zero_pads(plan, result.row_scales.view, journeys[journey++]);
    if (args.with_row_weights) zero_pads(plan, result.row_weights.view, journeys[journey++]);
    travel(met, journeys);
  });
  return result;
}

OwnedTensor CudaStaged::sum_rows(const char* operation, const Plan& plan,
                                 const GatherSumArgs& args) {
  const DeviceGuard guard(rank_.device());
  OwnedTensor out;
  std::vector<Journey> journeys;
  const bool weighted = args.weights.given();
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    rank_.check_plan(plan);
    rank_.check_tensor("rows", args.rows, {plan.capacity_rows(), rank_.config().width});
    check_rows_dtype("rows", args.rows);
    out = rank_.output_or_new("out", args.out, args.rows.dtype,
                              {plan.num_tokens(), rank_.config().width});
    journeys.push_back(rows_home(plan, args.rows));
    prepare(journeys[0]);
  });
  const CudaRank::Met met =
      meet(operation, plan, concat("dtype=", name_of(args.rows.dtype), ";weighted=", weighted),
           journeys, std::move(refusal));
  const EventRecorder::Scope scope(rank_.group().recorder(), operation, met.sequence);
  run_agreed(rank_.group(), [&] {
    travel(met, journeys);
    PullSumArgs pull{};
    pull.targets = exchange_of(plan).sum_targets();
    pull.weights = weighted ? device_plan(plan).arrays().weights : nullptr;
    pull.T = plan.num_tokens();
    pull.K = device_plan(plan).shape().K;
    pull.D = static_cast<int32_t>(rank_.config().width);
    pull.dtype = args.rows.dtype;
    pull.out = static_cast<std::byte*>(out.view.data);
    sum(met, journeys[0], pull);
  });
  return out;
}

// grad_out and the weights go to the rows, gradients are made there, and those of the weights come
// home.
CombineBackwardResult CudaStaged::combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                   ConstTensorView y) {
  const DeviceGuard guard(rank_.device());
  CombineBackwardResult result;
  OwnedTensor arrived_grad;
  OwnedTensor row_weights;
  OwnedTensor row_grads;
  std::vector<Journey> journeys;  // two out, one home
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    rank_.check_plan(plan);
    check_gradients(rank_, plan, grad_out, y);
    const int64_t R = plan.capacity_rows();
    result.grad_rows = rank_.take(y.dtype, y.shape);
    result.grad_weights = rank_.take(DType::kF32, {plan.num_tokens(), rank_.config().top_k});
    arrived_grad = rank_.take(y.dtype, y.shape);
    row_weights = rank_.take(DType::kF32, {R});
    row_grads = rank_.take(DType::kF32, {R});
    journeys.push_back(tokens_to_rows(plan, grad_out, arrived_grad.view));
    journeys.push_back(routes_to_rows(plan, plan.weights(), row_weights.view));
    journeys.push_back(rows_home(plan, row_grads.view));
    for (Journey& journey : journeys) prepare(journey);
  });
  const CudaRank::Met met =
      meet("combine_backward", plan, concat("dtype=", name_of(grad_out.dtype)), journeys,
           std::move(refusal));
  const EventRecorder::Scope scope(rank_.group().recorder(), "combine_backward", met.sequence);
  run_agreed(rank_.group(), [&] {
    const cudaStream_t stream = rank_.stream();
    zero_pads(plan, arrived_grad.view, journeys[0]);
    zero_pads(plan, row_weights.view, journeys[1]);
    travel(met, std::span(journeys).first(2));
    PushGradientsArgs push{};
    push.targets = exchange_of(plan).row_targets();
    push.weights = static_cast<const float*>(row_weights.view.data);
    push.T = plan.capacity_rows();
    push.K = 1;
    push.D = static_cast<int32_t>(rank_.config().width);
    push.dtype = y.dtype;
    push.grad_out = static_cast<const std::byte*>(arrived_grad.view.data);
    push.y[0] = static_cast<const std::byte*>(y.data);
    push.grad_rows[0] = static_cast<std::byte*>(result.grad_rows.view.data);
    push.grad_weights = static_cast<float*>(row_grads.view.data);
    push.signals = rank_.signals();
    push.signals.P = 0;  // for this rank alone
    launch_push_gradients(push, rank_.max_sms(), stream);
    travel(met, std::span(journeys).last(1));
    bring_home(plan, journeys[2], result.grad_weights.view);
  });
  return result;
}

OwnedTensor CudaStaged::collect_routes(const Plan& plan, ConstTensorView rows) {
  const DeviceGuard guard(rank_.device());
  OwnedTensor routes;
  std::vector<Journey> journeys;
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    rank_.check_plan(plan);
    rank_.check_tensor("rows", rows, {plan.capacity_rows()});
    CROSSDOCK_CHECK(rows.dtype == DType::kF32, "rows on a GPU must be fp32, got ",
                    name_of(rows.dtype));
    routes = rank_.take(rows.dtype, {plan.num_tokens(), rank_.config().top_k});
    journeys.push_back(rows_home(plan, rows));
    prepare(journeys[0]);
  });
  const CudaRank::Met met = meet("collect_routes", plan, concat("dtype=", name_of(rows.dtype)),
                                 journeys, std::move(refusal));
  const EventRecorder::Scope scope(rank_.group().recorder(), "collect_routes", met.sequence);
  run_agreed(rank_.group(), [&] {
    travel(met, journeys);
    bring_home(plan, journeys[0], routes.view);
  });
  return routes;
}

// One number per route that was sent; 0 for the others.
void CudaStaged::bring_home(const Plan& plan, const Journey& journey, const TensorView& routes) {
  zero(routes, rank_.stream());
  launch_move_rows({.from = journey.arrived.data(),
                    .from_index = nullptr,
                    .to = static_cast<std::byte*>(routes.data),
                    .to_index = exchange_of(plan).sent_routes(),
                    .num_rows = journey.traffic->num_received,
                    .row_bytes = journey.row_bytes},
                   rank_.stream());
}

OwnedTensor CudaStaged::allocate_rows(const Plan& plan, DType dtype) {
  const DeviceGuard guard(rank_.device());
  return rank_.take(dtype, {plan.capacity_rows(), rank_.config().width});
}

}  // namespace crossdock::cuda
