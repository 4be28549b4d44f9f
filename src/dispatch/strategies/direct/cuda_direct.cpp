#include "dispatch/strategies/direct/cuda_direct.hpp"

#include <utility>

#include "core/cuda/device.hpp"
#include "dispatch/cuda/kernels/push_gradients.hpp"
#include "dispatch/cuda/kernels/put.hpp"
#include "dispatch/cuda/kernels/route_values.hpp"

namespace crossdock::cuda {

CudaDirect::CudaDirect(DevicePathContext context, int device)
    : CudaPath(std::move(context), device, Waits::kForAll) {}

// The plan's own rows if they are still there and fit.
CudaPath::TakenRows CudaDirect::take_rows(const Plan& plan, DType dtype) {
  const CudaPlan& arrays = device_plan(plan);
  const Shape shape{plan.capacity_rows(), rank_.config().width};
  const int64_t num_bytes = shape.num_elements() * size_of(dtype);
  if (num_bytes == 0 || arrays.landing_bytes() < num_bytes) return CudaPath::take_rows(plan, dtype);
  const Buffer landing = arrays.take_landing();
  // A graph without the plan does not exchange it anew before it writes the rows again.
  const bool is_free = arrays.inputs().capture_id == capture_id(rank_.stream());
  return {.rows = {.view = landing.view(dtype, shape), .owner = landing.owner()},
          .is_free = is_free};
}

ReadyCall CudaDirect::ready_dispatch(const Plan& plan, const DispatchArgs& args,
                                     const DispatchResult& result) {
  std::vector<Landing> landings;
  for (const TensorView& rows :
       {result.rows.view, result.row_scales.view, result.row_weights.view}) {
    if (!rows.given()) continue;
    landings.push_back({.shown = rank_.show(rows.data, rows.num_bytes(), /*with_contents=*/false),
                        .row_bytes = rows.row_bytes()});
  }
  ReadyCall ready;
  for (const Landing& landing : landings) ready.handles.push_back(landing.shown.handle);
  ready.queue = [this, &plan, &args, landings = std::move(landings)](const CudaRank::Met& met) {
    queue_put(met, plan, args, landings);
  };
  return ready;
}

void CudaDirect::queue_put(const CudaRank::Met& met, const Plan& plan, const DispatchArgs& args,
                           std::span<const Landing> landings) {
  row_dtype_ = args.x.dtype;
  wants_landing_ = !args.rows.given();
  const CudaPlan& arrays = device_plan(plan);
  PutArgs put{};
  put.targets = arrays.arrays().targets;
  put.T = plan.num_tokens();
  put.K = arrays.shape().K;
  put.signals = rank_.signals();
  put.operation = Operation::kDispatch;
  const auto add_part = [&](const ConstTensorView& tokens) {
    const auto entry = static_cast<size_t>(put.num_parts);
    PutPart& part = put.parts[put.num_parts++];
    part.tokens = static_cast<const std::byte*>(tokens.data);
    part.row_bytes = landings[entry].row_bytes;
    rank_.reach(met, entry, part.rows);
  };
  add_part(args.x);
  if (args.scales.given()) add_part(args.scales);
  if (args.with_row_weights) {
    put.weights = arrays.arrays().weights;
    rank_.reach(met, static_cast<size_t>(put.num_parts), put.row_weights);
  }
  for (const Landing& landing : landings) {
    rank_.zero_pads(arrays, landing.shown.data, landing.row_bytes);
  }
  put.awaits_peers = met.needs_barrier && met.has_waiting_room;
  if (met.needs_barrier && !put.awaits_peers) {
    launch_barrier(rank_.signals(), put.operation, rank_.stream());
  }
  launch_put(put, rank_.max_sms(), rank_.stream());
  for (const Landing& landing : landings) rank_.fetch(landing.shown);
}

ReadyCall CudaDirect::ready_sum(Operation operation, const Plan& plan, const GatherSumArgs& args) {
  ShownMemory shown = rank_.show(args.rows.data, args.rows.num_bytes(), /*with_contents=*/true);
  ReadyCall ready{.handles = {shown.handle}};
  ready.queue = [this, operation, &plan, args, shown = std::move(shown)](const CudaRank::Met& met) {
    PullSumArgs pull = sum_args(operation, plan, args);
    pull.targets = device_plan(plan).arrays().targets;
    pull.signals = rank_.signals();
    rank_.reach(met, 0, pull.rows);
    pull.num_sharing = rank_.num_sharing();
    pull.awaits_peers = met.has_waiting_room;
    if (!pull.awaits_peers) {
      launch_barrier(rank_.signals(), operation, rank_.stream());
    }
    launch_pull_sum(pull, rank_.max_sms(), rank_.stream());
  };
  return ready;
}

ReadyCall CudaDirect::ready_gradients(const Plan& plan, const GradientTensors& tensors) {
  const TensorView& grad_rows = tensors.grad_rows;
  ShownMemory y = rank_.show(tensors.y.data, tensors.y.num_bytes(), /*with_contents=*/true);
  ShownMemory grad = rank_.show(grad_rows.data, grad_rows.num_bytes(), /*with_contents=*/false);
  ReadyCall ready{.handles = {y.handle, grad.handle}};
  ready.queue = [this, &plan, tensors, y = std::move(y),
                 grad = std::move(grad)](const CudaRank::Met& met) {
    const CudaPlan& arrays = device_plan(plan);
    PushGradientsArgs push{};
    push.targets = arrays.arrays().targets;
    push.weights = arrays.arrays().weights;
    push.T = plan.num_tokens();
    push.K = arrays.shape().K;
    push.D = static_cast<int32_t>(rank_.config().width);
    push.dtype = tensors.y.dtype;
    push.grad_out = static_cast<const std::byte*>(tensors.grad_out.data);
    push.grad_weights = static_cast<float*>(tensors.grad_weights.data);
    push.signals = rank_.signals();
    rank_.reach(met, 0, push.y);
    rank_.reach(met, 1, push.grad_rows);
    rank_.zero_pads(arrays, grad.data, tensors.grad_rows.row_bytes());
    launch_barrier(rank_.signals(), Operation::kCombineBackward, rank_.stream());
    launch_push_gradients(push, rank_.max_sms(), rank_.stream());
  };
  return ready;
}

ReadyCall CudaDirect::ready_routes(const Plan& plan, const ConstTensorView& rows,
                                   const TensorView& routes) {
  ShownMemory shown = rank_.show(rows.data, rows.num_bytes(), /*with_contents=*/true);
  ReadyCall ready{.handles = {shown.handle}};
  ready.queue = [this, &plan, routes, shown = std::move(shown)](const CudaRank::Met& met) {
    RouteValuesArgs values{};
    values.targets = device_plan(plan).arrays().targets;
    values.num_routes = routes.num_elements();
    values.routes = static_cast<float*>(routes.data);
    values.signals = rank_.signals();
    rank_.reach(met, 0, values.rows);
    launch_barrier(rank_.signals(), Operation::kRouteValues, rank_.stream());
    launch_gather_routes(values, rank_.stream());
  };
  return ready;
}

}  // namespace crossdock::cuda
