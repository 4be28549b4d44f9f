#include "dispatch/cuda/cuda_staged.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/allgather.hpp"
#include "dispatch/cuda/host_routing.hpp"
#include "dispatch/cuda/move_rows.hpp"
#include "dispatch/cuda/pull_sum.hpp"
#include "dispatch/cuda/push_gradients.hpp"
#include "dispatch/cuda/put.hpp"

namespace crossdock::cuda {

namespace {

bool is_relaying(const std::string& strategy) {
  return strategy == "direct" || strategy == "hierarchical";
}

// NCCL waits by itself.
Waits waits_of(const DevicePathContext& context, const void* nccl_comm) {
  if (nccl_comm == nullptr) return Waits::kForAll;
  return is_relaying(context.strategy_name) ? Waits::kForNode : Waits::kForNobody;
}

// Signals of a kernel that works for one rank alone.
PeerSignals alone(const CudaRank& rank) {
  PeerSignals signals = rank.signals();
  signals.P = 0;
  return signals;
}

}  // namespace

CudaStaged::CudaStaged(const DevicePathContext& context, int device, void* nccl_comm)
    : rank_(context, device, waits_of(context, nccl_comm)),
      transport_(nccl_comm != nullptr ? make_nccl_transport(rank_, nccl_comm)
                                      : make_peer_copies(rank_)),
      gathers_tokens_(rank_.context().strategy_name == "allgather"),
      relays_tokens_(is_relaying(rank_.context().strategy_name)) {
  CROSSDOCK_CHECK(!rank_.config().partial_sums, "partial_sums is not there on GPUs");
  CROSSDOCK_CHECK(!relays_tokens_ || rank_.group().size() < kMaxPeers, "between nodes at most ",
                  kMaxPeers - 1, " ranks can have their tokens relayed on GPUs, got ",
                  rank_.group().size(), "; use alltoall");
  const DeviceGuard guard(device);
  load_move_rows();
  load_pull_sum();
  load_push_gradients();
  load_put();
}

std::shared_ptr<const DevicePlanData> CudaStaged::upload(const Plan& host_plan) {
  std::vector<int64_t> arrival_tokens;
  if (gathers_tokens_) {
    arrival_tokens =
        exchange_arrival_tokens({rank_.group(), host_plan, host_plan.id(), "plan", {}});
  }
  auto arrays = std::make_shared<StagedArrays>(rank_, host_plan.data(), arrival_tokens);
  if (relays_tokens_) arrays->set_relay(std::make_unique<RelayPlan>(rank_, host_plan));
  return arrays;
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
  if (relays_tokens_) {
    journey.relay = relay_of(plan);
    journey.traffic = &journey.relay->copies();
    journey.from = static_cast<const std::byte*>(tokens.data);
    journey.from_index = journey.relay->copy_tokens();
    journey.row_bytes = rows.row_bytes();
    journey.num_tokens = plan.num_tokens();
    journey.rows = rows.data;
    journey.rows_bytes = rows.num_bytes();
    return journey;
  }
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
  if (journey.relay == nullptr) return;
  journey.shown_rows =
      rank_.show(journey.rows, journey.rows_bytes, /*with_contents=*/journey.is_read);
}

// The arrivals stay where they arrive.
CudaStaged::Journey CudaStaged::rows_home(const Plan& plan, const ConstTensorView& rows) {
  const ExchangePlan& exchange = exchange_of(plan);
  Journey journey;
  if (relays_tokens_ && rows.shape.rank() == 2) {  // single numbers take the plain way
    journey.relay = relay_of(plan);
    journey.traffic = &journey.relay->far_home();
    journey.from = static_cast<const std::byte*>(rows.data);
    journey.from_index = journey.relay->far_rows();
    journey.row_bytes = rows.row_bytes();
    journey.rows = rows.data;
    journey.rows_bytes = rows.num_bytes();
    journey.is_read = true;
    return journey;
  }
  journey.traffic = &exchange.home();
  journey.from = static_cast<const std::byte*>(rows.data);
  journey.from_index = exchange.arrival_rows();
  journey.row_bytes = rows.row_bytes();
  return journey;
}

CudaRank::Met CudaStaged::meet(const char* operation, const Plan& plan, std::string call_text,
                               std::span<Journey> journeys, std::optional<Error> refusal) {
  std::vector<MemoryHandle> handles;
  for (Journey& journey : journeys) {
    journey.entry = handles.size();
    handles.push_back(journey.shown.handle);
  }
  for (Journey& journey : journeys) {
    journey.rows_entry = handles.size();
    if (journey.relay != nullptr) handles.push_back(journey.shown_rows.handle);
  }
  return rank_.meet({.operation = operation,
                     .plan = &plan,
                     .call_text = std::move(call_text),
                     .handles = std::move(handles),
                     .refusal = std::move(refusal)});
}

void CudaStaged::travel(const CudaRank::Met& met, std::span<const Journey> journeys) {
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
  transport_->run(met, journeys[0].entry, transfers);
  for (const Journey& journey : journeys) {
    if (journey.relay != nullptr && !journey.is_read) forward(met, journey);
    launch_move_rows({.from = journey.arrived.data(),
                      .from_index = journey.arrival_index,
                      .to = journey.to,
                      .to_index = journey.to_index,
                      .num_rows = journey.num_landing,
                      .row_bytes = journey.row_bytes},
                     rank_.stream());
  }
}

// This rank's tokens, and the copies that arrived, into the rows of this node.
void CudaStaged::forward(const CudaRank::Met& met, const Journey& journey) {
  const cudaStream_t stream = rank_.stream();
  const RelayPlan& relay = *journey.relay;
  PutArgs put{};
  put.K = static_cast<int32_t>(rank_.config().top_k);
  put.num_parts = 1;
  put.parts[0].row_bytes = journey.row_bytes;
  rank_.reach_near(met, journey.rows_entry, put.parts[0].rows);
  launch_barrier(rank_.near_signals(), Operation::kDispatch, stream);
  put.targets = relay.near_targets();
  put.T = journey.num_tokens;
  put.parts[0].tokens = journey.from;
  put.signals = alone(rank_);
  launch_put(put, rank_.max_sms(), stream);
  put.targets = relay.copy_targets();
  put.T = relay.num_copies_received();
  put.parts[0].tokens = journey.arrived.data();
  put.signals = rank_.near_signals();
  launch_put(put, rank_.max_sms(), stream);
  rank_.fetch(journey.shown_rows, const_cast<void*>(journey.rows), journey.rows_bytes);
}

// Zeroes the pad rows where rows land.
void CudaStaged::zero_pads(const Plan& plan, const TensorView& rows, const Journey& journey) const {
  TensorView landing = rows;
  if (journey.relay != nullptr) landing.data = journey.shown_rows.data;
  rank_.zero_pads(static_cast<const CudaPlan&>(*plan.device_data()), landing);
}

// Sums what came home and, inside a node, what is read where it lies.
void CudaStaged::sum(const CudaRank::Met& met, const Journey& journey, PullSumArgs& args) {
  if (journey.relay == nullptr) {
    args.rows[0] = journey.arrived.data();
    args.signals = alone(rank_);
  } else {
    args.targets = journey.relay->sum_targets();
    rank_.reach_near(met, journey.rows_entry, args.rows);
    args.rows[rank_.group().size()] = journey.arrived.data();
    args.signals = rank_.near_signals();
    launch_barrier(args.signals, Operation::kCombine, rank_.stream());
  }
  launch_pull_sum(args, rank_.max_sms(), rank_.stream());
}

}  // namespace crossdock::cuda
