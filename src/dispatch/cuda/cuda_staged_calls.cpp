#include <utility>

#include "core/cuda/check.hpp"
#include "dispatch/cuda/cuda_staged.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/push_gradients.hpp"

namespace crossdock::cuda {

ReadyCall CudaStaged::ready_dispatch(const Plan& plan, const DispatchArgs& args,
                                     const DispatchResult& result) {
  std::vector<Journey> journeys{tokens_to_rows(plan, args.x, result.rows.view)};
  if (args.scales.given()) {
    journeys.push_back(tokens_to_rows(plan, args.scales, result.row_scales.view));
  }
  if (args.with_row_weights) {
    journeys.push_back(routes_to_rows(plan, plan.weights(), result.row_weights.view));
  }
  return ready(std::move(journeys),
               [this, &plan](const CudaRank::Met& met, std::span<const Journey> journeys) {
                 for (const Journey& journey : journeys) zero_pads(plan, journey);
                 travel(met, Operation::kDispatch, journeys);
               });
}

ReadyCall CudaStaged::ready_sum(Operation operation, const Plan& plan, const GatherSumArgs& args) {
  return ready(
      {rows_home(plan, args.rows)},
      [this, operation, &plan, args](const CudaRank::Met& met, std::span<const Journey> journeys) {
        travel(met, operation, journeys);
        PullSumArgs pull = sum_args(operation, plan, args);
        pull.targets = staged_plan(plan).exchange().sum_targets;
        sum(met, journeys[0], pull);
      });
}

// grad_out and the weights go to the rows, gradients are made there, and those of the weights come
// home.
ReadyCall CudaStaged::ready_gradients(const Plan& plan, const GradientTensors& tensors) {
  const int64_t R = plan.capacity_rows();
  const GradientRows rows{.grad_out = rank_.take(tensors.y.dtype, tensors.y.shape),
                          .weights = rank_.take(DType::kF32, {R}),
                          .grad_weights = rank_.take(DType::kF32, {R})};
  return ready(
      {tokens_to_rows(plan, tensors.grad_out, rows.grad_out.view),
       routes_to_rows(plan, plan.weights(), rows.weights.view),
       rows_home(plan, rows.grad_weights.view)},
      [this, &plan, tensors, rows](const CudaRank::Met& met, std::span<const Journey> journeys) {
        const std::span<const Journey> out = journeys.first(2);
        for (const Journey& journey : out) zero_pads(plan, journey);
        travel(met, Operation::kCombineBackward, out);
        make_gradients(plan, tensors, rows);
        travel(met, Operation::kCombineBackward, journeys.last(1));
        bring_home(plan, journeys.back(), tensors.grad_weights);
      });
}

void CudaStaged::make_gradients(const Plan& plan, const GradientTensors& tensors,
                                const GradientRows& rows) const {
  PushGradientsArgs push{};
  push.targets = staged_plan(plan).exchange().row_targets;
  push.weights = static_cast<const float*>(rows.weights.view.data);
  push.T = plan.capacity_rows();
  push.K = 1;
  push.D = static_cast<int32_t>(rank_.config().width);
  push.dtype = tensors.y.dtype;
  push.grad_out = static_cast<const std::byte*>(rows.grad_out.view.data);
  push.y[0] = static_cast<const std::byte*>(tensors.y.data);
  push.grad_rows[0] = static_cast<std::byte*>(tensors.grad_rows.data);
  push.grad_weights = static_cast<float*>(rows.grad_weights.view.data);
  push.signals = rank_.signals_alone();
  launch_push_gradients(push, rank_.max_sms(), rank_.stream());
}

ReadyCall CudaStaged::ready_routes(const Plan& plan, const ConstTensorView& rows,
                                   const TensorView& routes) {
  return ready({rows_home(plan, rows)},
               [this, &plan, routes](const CudaRank::Met& met, std::span<const Journey> journeys) {
                 travel(met, Operation::kRouteValues, journeys);
                 bring_home(plan, journeys[0], routes);
               });
}

// One number per route that was sent; 0 for the others.
void CudaStaged::bring_home(const Plan& plan, const Journey& journey, const TensorView& routes) {
  if (routes.num_bytes() > 0) {
    CROSSDOCK_CUDA(
        cudaMemsetAsync(routes.data, 0, static_cast<size_t>(routes.num_bytes()), rank_.stream()));
  }
  launch_move_rows({.from = static_cast<const std::byte*>(journey.arrived.view.data),
                    .from_index = nullptr,
                    .to = static_cast<std::byte*>(routes.data),
                    .to_index = staged_plan(plan).exchange().sent_routes,
                    .num_rows = journey.traffic->num_received,
                    .row_bytes = journey.row_bytes},
                   rank_.stream());
}

}  // namespace crossdock::cuda
