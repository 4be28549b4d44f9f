#include "dispatch/cuda/cuda_staged.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/allgather.hpp"
#include "dispatch/cuda/host_routing.hpp"
#include "dispatch/cuda/move_rows.hpp"
#include "dispatch/cuda/pull_sum.hpp"
#include "dispatch/cuda/push_gradients.hpp"

namespace crossdock::cuda {

CudaStaged::CudaStaged(DevicePathContext context, int device, void* nccl_comm)
    : rank_(std::move(context), device, /*waits_on_device=*/nccl_comm == nullptr),
      transport_(nccl_comm != nullptr ? make_nccl_transport(rank_, nccl_comm)
                                      : make_peer_copies(rank_)),
      gathers_tokens_(rank_.context().strategy_name == "allgather") {
  CROSSDOCK_CHECK(!rank_.config().partial_sums, "partial_sums is not there on GPUs");
  const DeviceGuard guard(device);
  load_move_rows();
  load_pull_sum();
  load_push_gradients();
}

std::shared_ptr<const DevicePlanData> CudaStaged::upload(const Plan& host_plan) {
  std::vector<int64_t> arrival_tokens;
  if (gathers_tokens_) {
    arrival_tokens =
        exchange_arrival_tokens({rank_.group(), host_plan, host_plan.id(), "plan", {}});
  }
  return std::make_shared<StagedArrays>(rank_, host_plan.data(), arrival_tokens);
}

Plan CudaStaged::plan(const Routing& routing, const PlanOnHost& plan) {
  const DeviceGuard guard(rank_.device());
  return plan_on_host(rank_, routing, plan, [&](const Plan& made) { return upload(made); });
}

Plan CudaStaged::plan(const DenseRouting& routing, const PlanDenseOnHost& plan) {
  const DeviceGuard guard(rank_.device());
  return plan_on_host(rank_, routing, plan, [&](const Plan& made) { return upload(made); });
}

CudaStaged::Journey CudaStaged::tokens_to_rows(const Plan& plan, const ConstTensorView& tokens,
                                               const TensorView& rows) {
  const ExchangePlan& exchange = exchange_of(plan);
  Journey journey;
  journey.traffic = gathers_tokens_ ? &exchange.tokens() : &exchange.out();
  journey.from = static_cast<const std::byte*>(tokens.data);
  journey.from_index = exchange.sent_tokens();
  journey.is_packed = !gathers_tokens_;
  journey.to = static_cast<std::byte*>(rows.data);
  journey.to_index = exchange.arrival_rows();
  journey.arrival_index = gathers_tokens_ ? exchange.arrival_tokens() : nullptr;
  journey.num_landing = exchange.out().num_received;
  journey.row_bytes = rows.row_bytes();
  return journey;
}

CudaStaged::Journey CudaStaged::routes_to_rows(const Plan& plan, const ConstTensorView& routes,
                                               const TensorView& rows) {
  const ExchangePlan& exchange = exchange_of(plan);
  Journey journey;
  journey.traffic = &exchange.out();
  journey.from = static_cast<const std::byte*>(routes.data);
  journey.from_index = exchange.sent_routes();
  journey.to = static_cast<std::byte*>(rows.data);
  journey.to_index = exchange.arrival_rows();
  journey.num_landing = exchange.out().num_received;
  journey.row_bytes = rows.row_bytes();
  return journey;
}

void CudaStaged::prepare(Journey& journey) {
  const int64_t send_bytes = journey.traffic->num_sent * journey.row_bytes;
  const std::byte* sent = journey.from;
  if (journey.is_packed) {
    journey.send = rank_.pool().take(send_bytes, rank_.stream());
    sent = journey.send.data();
  }
  journey.shown = rank_.show(sent, send_bytes, /*with_contents=*/!journey.is_packed);
  journey.arrived =
      rank_.pool().take(journey.traffic->num_received * journey.row_bytes, rank_.stream());
}

// The arrivals stay where they arrive.
CudaStaged::Journey CudaStaged::rows_home(const Plan& plan, const ConstTensorView& rows) {
  const ExchangePlan& exchange = exchange_of(plan);
  Journey journey;
  journey.traffic = &exchange.home();
  journey.from = static_cast<const std::byte*>(rows.data);
  journey.from_index = exchange.arrival_rows();
  journey.row_bytes = rows.row_bytes();
  return journey;
}

CudaRank::Met CudaStaged::meet(const char* operation, const Plan& plan, std::string call_text,
                               std::span<const Journey> journeys, std::optional<Error> refusal) {
  std::vector<MemoryHandle> handles;
  for (const Journey& journey : journeys) handles.push_back(journey.shown.handle);
  return rank_.meet({.operation = operation,
                     .plan = &plan,
                     .call_text = std::move(call_text),
                     .handles = std::move(handles),
                     .refusal = std::move(refusal)});
}

void CudaStaged::travel(const CudaRank::Met& met, std::span<const Journey> journeys,
                        size_t first_entry) {
  std::vector<RowTransfer> transfers;
  for (const Journey& journey : journeys) {
    if (journey.is_packed) {
      launch_move_rows({.from = journey.from,
                        .from_index = journey.from_index,
                        .to = journey.send.data(),
                        .to_index = nullptr,
                        .num_rows = journey.traffic->num_sent,
                        .row_bytes = journey.row_bytes},
                       rank_.stream());
    }
    transfers.push_back({.traffic = *journey.traffic,
                         .send = journey.shown.data,
                         .recv = journey.arrived.data(),
                         .row_bytes = journey.row_bytes});
  }
  transport_->run(met, first_entry, transfers);
  for (const Journey& journey : journeys) {
    launch_move_rows({.from = journey.arrived.data(),
                      .from_index = journey.arrival_index,
                      .to = journey.to,
                      .to_index = journey.to_index,
                      .num_rows = journey.num_landing,
                      .row_bytes = journey.row_bytes},
                     rank_.stream());
  }
}

}  // namespace crossdock::cuda
