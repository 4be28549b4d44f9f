#include "dispatch/cuda/cuda_staged.hpp"

#include <utility>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/push_gradients.hpp"
#include "dispatch/cuda/kernels/put.hpp"
#include "dispatch/strategies/allgather/allgather.hpp"

namespace crossdock::cuda {

namespace {

bool is_relaying(const std::string& strategy) {
  return strategy == "direct" || strategy == "hierarchical";
}

// Where the transport waits for peers itself, as NCCL does.
Waits waits_beside_transport(const DevicePathContext& context) {
  return is_relaying(context.strategy_name) ? Waits::kForNode : Waits::kForNobody;
}

std::byte* bytes(const OwnedTensor& tensor) {
  return static_cast<std::byte*>(tensor.view.data);
}

}  // namespace

CudaStaged::CudaStaged(const DevicePathContext& context, int device, void* nccl_comm)
    : CudaStaged(context, device,
                 nccl_comm != nullptr ? waits_beside_transport(context) : Waits::kForAll,
                 [nccl_comm](CudaRank& rank) {
                   return nccl_comm != nullptr ? make_nccl_transport(rank, nccl_comm)
                                               : make_peer_copies(rank);
                 }) {}

CudaStaged::CudaStaged(const DevicePathContext& context, int device,
                       const MakeTransport& make_transport)
    : CudaStaged(context, device, waits_beside_transport(context), make_transport) {}

CudaStaged::CudaStaged(const DevicePathContext& context, int device, Waits waits,
                       const MakeTransport& make_transport)
    : CudaPath(context, device, waits),
      transport_(make_transport(rank_)),
      gathers_tokens_(rank_.context().strategy_name == "allgather"),
      relays_tokens_(is_relaying(rank_.context().strategy_name)) {}

std::shared_ptr<const DevicePlanData> CudaStaged::upload(const Plan& host_plan) {
  std::vector<int64_t> arrival_tokens;
  if (gathers_tokens_) {
    arrival_tokens =
        exchange_arrival_tokens({rank_.group(), host_plan, host_plan.id(), "plan", {}});
  }
  auto arrays = std::make_shared<StagedArrays>(rank_, host_plan.data(), arrival_tokens);
  if (relays_tokens_) arrays->set_relay(make_relay_plan(rank_, host_plan));
  return arrays;
}

CudaStaged::Journey CudaStaged::tokens_to_rows(const Plan& plan, const ConstTensorView& tokens,
                                               const TensorView& rows) const {
  Journey journey{.from = static_cast<const std::byte*>(tokens.data),
                  .row_bytes = rows.row_bytes()};
  if (relays_tokens_) {
    journey.relay = staged_plan(plan).relay();
    journey.traffic = &journey.relay->copies;
    journey.from_index = journey.relay->copy_tokens;
    journey.num_tokens = plan.num_tokens();
    journey.rows = rows.data;
    journey.rows_bytes = rows.num_bytes();
    return journey;
  }
  const ExchangePlan& exchange = staged_plan(plan).exchange();
  journey.traffic = gathers_tokens_ ? &exchange.tokens : &exchange.out;
  journey.from_index = exchange.sent_tokens;
  journey.is_packed = !gathers_tokens_;
  journey.to = static_cast<std::byte*>(rows.data);
  journey.to_index = exchange.arrival_rows;
  journey.arrival_index = gathers_tokens_ ? exchange.arrival_tokens : nullptr;
  journey.num_landing = exchange.out.num_received;
  return journey;
}

CudaStaged::Journey CudaStaged::routes_to_rows(const Plan& plan, const ConstTensorView& routes,
                                               const TensorView& rows) const {
  const ExchangePlan& exchange = staged_plan(plan).exchange();
  return {.traffic = &exchange.out,
          .from = static_cast<const std::byte*>(routes.data),
          .from_index = exchange.sent_routes,
          .to = static_cast<std::byte*>(rows.data),
          .to_index = exchange.arrival_rows,
          .num_landing = exchange.out.num_received,
          .row_bytes = rows.row_bytes()};
}

// The arrivals stay where they arrive.
CudaStaged::Journey CudaStaged::rows_home(const Plan& plan, const ConstTensorView& rows) const {
  const ExchangePlan& exchange = staged_plan(plan).exchange();
  Journey journey{.traffic = &exchange.home,
                  .from = static_cast<const std::byte*>(rows.data),
                  .from_index = exchange.arrival_rows,
                  .row_bytes = rows.row_bytes()};
  if (relays_tokens_ && rows.shape.rank() == 2) {  // single numbers take the plain way
    journey.relay = staged_plan(plan).relay();
    journey.traffic = &journey.relay->far_home;
    journey.from_index = journey.relay->far_rows;
    journey.is_read = true;
    journey.rows = rows.data;
    journey.rows_bytes = rows.num_bytes();
  }
  return journey;
}

void CudaStaged::prepare(Journey& journey) {
  const RowTraffic& traffic = *journey.traffic;
  const void* sent = journey.from;
  if (journey.is_packed) {
    journey.packed = rank_.take(DType::kU8, {traffic.num_sent, journey.row_bytes});
    sent = journey.packed.view.data;
  }
  journey.shown = rank_.show(sent, traffic.num_sent * journey.row_bytes,
                             /*with_contents=*/!journey.is_packed);
  journey.arrived = rank_.take(DType::kU8, {traffic.num_received, journey.row_bytes});
  if (journey.relay == nullptr) return;
  journey.shown_rows =
      rank_.show(journey.rows, journey.rows_bytes, /*with_contents=*/journey.is_read);
}

ReadyCall CudaStaged::ready(std::vector<Journey> journeys, QueueJourneys queue) {
  ReadyCall call;
  for (Journey& journey : journeys) {
    prepare(journey);
    journey.entry = call.handles.size();
    call.handles.push_back(journey.shown.handle);
  }
  for (Journey& journey : journeys) {  // behind: transports count on the others' order
    journey.rows_entry = call.handles.size();
    if (journey.relay != nullptr) call.handles.push_back(journey.shown_rows.handle);
  }
  call.queue = [journeys = std::move(journeys),
                queue = std::move(queue)](const CudaRank::Met& met) { queue(met, journeys); };
  return call;
}

void CudaStaged::travel(const CudaRank::Met& met, Operation operation,
                        std::span<const Journey> journeys) {
  std::vector<RowTransfer> transfers;
  for (const Journey& journey : journeys) {
    if (journey.is_packed) {
      launch_move_rows({.from = journey.from,
                        .from_index = journey.from_index,
                        .to = bytes(journey.packed),
                        .to_index = nullptr,
                        .num_rows = journey.traffic->num_sent,
                        .row_bytes = journey.row_bytes},
                       rank_.stream());
    }
    transfers.push_back({.traffic = *journey.traffic,
                         .send = journey.shown.data,
                         .recv = bytes(journey.arrived),
                         .row_bytes = journey.row_bytes,
                         .operation = operation});
  }
  transport_->run(met, journeys[0].entry, transfers);
  for (const Journey& journey : journeys) {
    if (journey.relay != nullptr && !journey.is_read) forward(met, operation, journey);
    launch_move_rows({.from = bytes(journey.arrived),
                      .from_index = journey.arrival_index,
                      .to = journey.to,
                      .to_index = journey.to_index,
                      .num_rows = journey.num_landing,
                      .row_bytes = journey.row_bytes},
                     rank_.stream());
  }
}

// This rank's tokens, and the copies that arrived, into the rows of this node.
void CudaStaged::forward(const CudaRank::Met& met, Operation operation, const Journey& journey) {
  const cudaStream_t stream = rank_.stream();
  const RelayPlan& relay = *journey.relay;
  PutArgs put{};
  put.K = static_cast<int32_t>(rank_.config().top_k);
  put.num_parts = 1;
  put.parts[0].row_bytes = journey.row_bytes;
  rank_.reach_near(met, journey.rows_entry, put.parts[0].rows);
  put.operation = operation;
  launch_barrier(rank_.near_signals(), operation, stream);
  put.targets = relay.near_targets;
  put.T = journey.num_tokens;
  put.parts[0].tokens = journey.from;
  put.signals = rank_.signals_alone();
  launch_put(put, rank_.max_sms(), stream);
  put.targets = relay.copy_targets;
  put.T = relay.copies.num_received;
  put.parts[0].tokens = bytes(journey.arrived);
  put.signals = rank_.near_signals();
  launch_put(put, rank_.max_sms(), stream);
  rank_.fetch(journey.shown_rows);
}

void CudaStaged::zero_pads(const Plan& plan, const Journey& journey) const {
  std::byte* rows = journey.relay != nullptr ? journey.shown_rows.data : journey.to;
  rank_.zero_pads(device_plan(plan), rows, journey.row_bytes);
}

// Sums what came home and, inside a node, what is read where it lies.
void CudaStaged::sum(const CudaRank::Met& met, const Journey& journey, PullSumArgs& args) {
  if (journey.relay == nullptr) {
    args.rows[0] = bytes(journey.arrived);
    args.signals = rank_.signals_alone();
  } else {
    args.targets = journey.relay->sum_targets;
    rank_.reach_near(met, journey.rows_entry, args.rows);
    args.rows[rank_.channel_ranks().size()] = bytes(journey.arrived);
    args.signals = rank_.near_signals();
    launch_barrier(args.signals, args.operation, rank_.stream());
  }
  launch_pull_sum(args, rank_.max_sms(), rank_.stream());
}

}  // namespace crossdock::cuda
