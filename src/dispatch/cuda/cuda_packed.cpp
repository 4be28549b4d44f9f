#include "dispatch/cuda/cuda_packed.hpp"

#include <algorithm>
#include <utility>

#include "core/cuda/check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/kernels/gather_sum_backward.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"

namespace crossdock::cuda {
namespace {

// For transports that wait for peers themselves, as NCCL does.
Waits waits_outside_transport(const Packing& packing) {
  return packing.relay ? Waits::kForNode : Waits::kNone;
}

// Processes on several nodes cannot reach each other's memory.
bool uses_nccl(const PathContext& context) {
  const bool is_in_reach = context.group.communicator().shares_address_space() ||
                           context.group.topology().num_nodes <= 1;
  return context.options.nccl_comm != nullptr || !is_in_reach;
}

bool uses_peer_memory(const PathContext& context) {
  return !uses_nccl(context) && context.gpus_reach_each_other;
}

// Bytes that leave this rank.
int64_t bytes_to_others(std::span<const RowTransfer> transfers, int rank) {
  int64_t num_bytes = 0;
  for (const RowTransfer& transfer : transfers) {
    const std::vector<RowTraffic::Part>& parts = transfer.traffic.parts;
    for (size_t p = 0; p < parts.size(); ++p) {
      if (p != static_cast<size_t>(rank)) num_bytes += parts[p].send_count * transfer.row_bytes;
    }
  }
  return num_bytes;
}

EventPeers peers_of(std::span<const RowTransfer> transfers, int rank) {
  EventPeers peers;
  for (int p = 0; p < std::ssize(transfers[0].traffic.parts); ++p) {
    const bool is_peer = std::any_of(transfers.begin(), transfers.end(), [&](const RowTransfer& t) {
      const RowTraffic::Part& part = t.traffic.parts[static_cast<size_t>(p)];
      return part.send_count > 0 || part.recv_count > 0;
    });
    if (p != rank && is_peer) peers.add(p);
  }
  return peers;
}

// REQUIRES: a CudaPacked made the plan.
const PackedPlan& packed_plan(const Plan& plan) {
  return static_cast<const PackedPlan&>(*plan.device_data());
}

std::byte* bytes(const OwnedTensor& tensor) {
  return static_cast<std::byte*>(tensor.view.data);
}

}  // namespace

CudaPacked::CudaPacked(const PathContext& context, int device, const Packing& packing)
    : CudaPacked(context, device, packing,
                 uses_peer_memory(context) ? Waits::kForAll : waits_outside_transport(packing),
                 [&context](CudaRank& rank) {
                   if (uses_nccl(context)) {
                     return make_nccl_transport(rank, context.options.nccl_comm);
                   }
                   return uses_peer_memory(context) ? make_peer_copies(rank)
                                                    : make_staged_copies(rank);
                 }) {}

CudaPacked::CudaPacked(const PathContext& context, int device, const Packing& packing,
                       const MakeTransport& make_transport)
    : CudaPacked(context, device, packing, waits_outside_transport(packing), make_transport) {}

CudaPacked::CudaPacked(const PathContext& context, int device, const Packing& packing, Waits waits,
                       const MakeTransport& make_transport)
    : CudaPath(context, device,
               {.strategy = context.strategy->name(),
                .waits = waits,
                .uses_rows_in_place = packing.relay != nullptr}),
      packing_(packing),
      transport_(make_transport(rank_)) {}

// A call has several kernels that wait for peers, with others queued behind them. Layers whose
// ranks share a GPU have stalled with such kernels in two streams per rank; the cause is unknown.
bool CudaPacked::runs_aside() const {
  return !context().ranks_share_gpus || !uses_peer_memory(context());
}

std::shared_ptr<const DevicePlanData> CudaPacked::upload(const Plan& host_plan) {
  std::span<const int64_t> arrival_tokens;
  if (packing_.arrival_tokens) arrival_tokens = packing_.arrival_tokens(host_plan);
  auto arrays = std::make_shared<PackedPlan>(rank_, host_plan.data(), arrival_tokens);
  if (packing_.relay) arrays->set_relay(packing_.relay(rank_, host_plan));
  if (config().partial_sums != PartialSums::kNone) {
    arrays->set_partial_sums(
        make_partial_sum_plan(rank_, host_plan, packing_.sum_lists(rank_, host_plan)));
  }
  return arrays;
}

ReadyCall CudaPacked::ready_dispatch(const Plan& plan, const DispatchArgs& args,
                                     const DispatchResult& result) {
  std::vector<RowBatch> batches{tokens_to_rows(plan, args.x, result.rows.view)};
  if (args.scales.given()) {
    batches.push_back(tokens_to_rows(plan, args.scales, result.row_scales.view));
  }
  if (args.with_row_weights) {
    batches.push_back(routes_to_rows(plan, plan.weights(), result.row_weights.view));
  }
  return ready_batches(std::move(batches), [this, &plan](const CudaRank::Agreed& agreed,
                                                         std::span<const RowBatch> batches) {
    for (const RowBatch& batch : batches) zero_pads(plan, batch);
    exchange(agreed, Operation::kDispatch, batches);
  });
}

ReadyCall CudaPacked::ready_gather_sum(const char* operation, const Plan& plan,
                                       const GatherSumArgs& args) {
  if (config().partial_sums != PartialSums::kNone) {
    return ready_partial_sums(operation, plan, args);
  }
  return ready_batches({rows_to_tokens(plan, args.rows)},
                       [this, operation, &plan, args](const CudaRank::Agreed& agreed,
                                                      std::span<const RowBatch> batches) {
                         GatherSumKernelArgs gather = sum_args(operation, plan, args);
                         exchange(agreed, gather.operation, batches);
                         gather.targets = packed_plan(plan).exchange().sum_targets;
                         sum(agreed, batches[0], gather);
                       });
}

ReadyCall CudaPacked::ready_partial_sums(const char* operation, const Plan& plan,
                                         const GatherSumArgs& args) {
  return ready_batches({partial_sums_to_tokens(plan, args.rows)},
                       [this, operation, &plan, args](const CudaRank::Agreed& agreed,
                                                      std::span<const RowBatch> batches) {
                         SumGroupsArgs sum{};
                         sum.D = static_cast<int32_t>(config().width);
                         sum.row_dtype = args.rows.dtype;
                         sum.partial_dtype = partial_dtype(config().partial_sums, args.rows.dtype);
                         sum.is_weighted = args.weights.given();
                         sum.operation = operation_of(operation);
                         sum.out = static_cast<std::byte*>(args.out.data);
                         sum_partials(agreed, batches[0], plan, sum);
                       });
}

// Sends grad_out and the weights to the rows, computes both gradients there and returns the weight
// gradients.
ReadyCall CudaPacked::ready_combine_backward(const Plan& plan, const GradientTensors& tensors) {
  const int64_t R = plan.capacity_rows();
  const GradientRows rows{.grad_out = rank_.take(tensors.y.dtype, tensors.y.shape),
                          .weights = rank_.take(DType::kF32, {R}),
                          .grad_weights = rank_.take(DType::kF32, {R})};
  return ready_batches({tokens_to_rows(plan, tensors.grad_out, rows.grad_out.view),
                        routes_to_rows(plan, plan.weights(), rows.weights.view),
                        rows_to_tokens(plan, rows.grad_weights.view)},
                       [this, &plan, tensors, rows](const CudaRank::Agreed& agreed,
                                                    std::span<const RowBatch> batches) {
                         const std::span<const RowBatch> out = batches.first(2);
                         for (const RowBatch& batch : out) zero_pads(plan, batch);
                         exchange(agreed, Operation::kCombineBackward, out);
                         make_gradients(plan, tensors, rows);
                         exchange(agreed, Operation::kCombineBackward, batches.last(1));
                         unpack_routes(plan, batches.back(), tensors.grad_weights);
                       });
}

void CudaPacked::make_gradients(const Plan& plan, const GradientTensors& tensors,
                                const GradientRows& rows) const {
  GatherSumBackwardArgs backward{};
  backward.targets = packed_plan(plan).exchange().row_targets;
  backward.weights = static_cast<const float*>(rows.weights.view.data);
  backward.T = plan.capacity_rows();
  backward.K = 1;
  backward.D = static_cast<int32_t>(config().width);
  backward.dtype = tensors.y.dtype;
  backward.grad_out = static_cast<const std::byte*>(rows.grad_out.view.data);
  backward.y.known[0] = static_cast<const std::byte*>(tensors.y.data);
  backward.grad_rows.known[0] = static_cast<std::byte*>(tensors.grad_rows.data);
  backward.grad_weights = static_cast<float*>(rows.grad_weights.view.data);
  backward.signals = rank_.local_signals();
  launch_gather_sum_backward(backward, rank_.max_sms(), rank_.stream());
}

ReadyCall CudaPacked::ready_collect_routes(const Plan& plan, const ConstTensorView& rows,
                                           const TensorView& routes) {
  return ready_batches(
      {rows_to_tokens(plan, rows)},
      [this, &plan, routes](const CudaRank::Agreed& agreed, std::span<const RowBatch> batches) {
        exchange(agreed, Operation::kRouteValues, batches);
        unpack_routes(plan, batches[0], routes);
      });
}

// Writes one number per sent route, and 0 for the others.
void CudaPacked::unpack_routes(const Plan& plan, const RowBatch& batch, const TensorView& routes) {
  if (routes.num_bytes() > 0) {
    CROSSDOCK_CUDA(
        cudaMemsetAsync(routes.data, 0, static_cast<size_t>(routes.num_bytes()), rank_.stream()));
  }
  launch_move_rows({.from = static_cast<const std::byte*>(batch.arrived.view.data),
                    .from_index = nullptr,
                    .to = static_cast<std::byte*>(routes.data),
                    .to_index = packed_plan(plan).exchange().sent_routes,
                    .num_rows = batch.traffic->num_received,
                    .row_bytes = batch.row_bytes},
                   rank_.stream());
}

CudaPacked::RowBatch CudaPacked::tokens_to_rows(const Plan& plan, const ConstTensorView& tokens,
                                                const TensorView& rows) const {
  RowBatch batch{.from = static_cast<const std::byte*>(tokens.data), .row_bytes = rows.row_bytes()};
  if (packing_.relay) {
    batch.relay = packed_plan(plan).relay();
    batch.traffic = &batch.relay->copies;
    batch.from_index = batch.relay->copy_tokens;
    batch.num_tokens = plan.num_tokens();
    batch.rows = rows.data;
    batch.rows_bytes = rows.num_bytes();
    return batch;
  }
  const ExchangePlan& exchange = packed_plan(plan).exchange();
  batch.traffic = packing_.arrival_tokens ? &exchange.tokens : &exchange.out;
  batch.from_index = exchange.sent_tokens;
  batch.is_packed = !packing_.arrival_tokens;
  batch.to = static_cast<std::byte*>(rows.data);
  batch.to_index = exchange.arrival_rows;
  batch.arrival_index = packing_.arrival_tokens ? exchange.arrival_tokens : nullptr;
  batch.num_unpacked = exchange.out.num_received;
  return batch;
}

CudaPacked::RowBatch CudaPacked::routes_to_rows(const Plan& plan, const ConstTensorView& routes,
                                                const TensorView& rows) const {
  const ExchangePlan& exchange = packed_plan(plan).exchange();
  return {.traffic = &exchange.out,
          .from = static_cast<const std::byte*>(routes.data),
          .from_index = exchange.sent_routes,
          .to = static_cast<std::byte*>(rows.data),
          .to_index = exchange.arrival_rows,
          .num_unpacked = exchange.out.num_received,
          .row_bytes = rows.row_bytes()};
}

// Arrivals are not unpacked.
CudaPacked::RowBatch CudaPacked::rows_to_tokens(const Plan& plan,
                                                const ConstTensorView& rows) const {
  const ExchangePlan& exchange = packed_plan(plan).exchange();
  RowBatch batch{.traffic = &exchange.home,
                 .from = static_cast<const std::byte*>(rows.data),
                 .from_index = exchange.arrival_rows,
                 .row_bytes = rows.row_bytes()};
  if (packing_.relay && rows.shape.rank() == 2) {  // single numbers are not relayed
    batch.relay = packed_plan(plan).relay();
    batch.traffic = &batch.relay->far_returned;
    batch.from_index = batch.relay->far_rows;
    batch.is_read = true;
    batch.rows = rows.data;
    batch.rows_bytes = rows.num_bytes();
  }
  return batch;
}

// Sums take the place of packed rows.
CudaPacked::RowBatch CudaPacked::partial_sums_to_tokens(const Plan& plan,
                                                        const ConstTensorView& rows) const {
  const DType dtype = partial_dtype(config().partial_sums, rows.dtype);
  RowBatch batch{.traffic = &packed_plan(plan).partial_sums().traffic,
                 .from = static_cast<const std::byte*>(rows.data),
                 .row_bytes = config().width * size_of(dtype)};
  if (packing_.relay) {
    batch.relay = packed_plan(plan).relay();
    batch.is_read = true;
    batch.rows = rows.data;
    batch.rows_bytes = rows.num_bytes();
  }
  return batch;
}

void CudaPacked::take_memory(RowBatch& batch) {
  const RowTraffic& traffic = *batch.traffic;
  const void* sent = batch.from;
  if (batch.is_packed) {
    batch.packed = rank_.take(DType::kU8, {traffic.num_sent, batch.row_bytes});
    sent = batch.packed.view.data;
  }
  batch.shown = rank_.show(sent, traffic.num_sent * batch.row_bytes,
                           /*with_contents=*/!batch.is_packed);
  batch.arrived = rank_.take(DType::kU8, {traffic.num_received, batch.row_bytes});
  if (batch.relay == nullptr) return;
  batch.shown_rows = rank_.show(batch.rows, batch.rows_bytes, /*with_contents=*/batch.is_read);
}

ReadyCall CudaPacked::ready_batches(std::vector<RowBatch> batches, QueueBatches queue) {
  transport_->check_usable();
  CudaCall call;
  for (RowBatch& batch : batches) {
    take_memory(batch);
    batch.entry = call.handles.size();
    call.handles.push_back(batch.shown.handle);
  }
  for (RowBatch& batch : batches) {  // last: transports expect the other handles to be contiguous
    batch.rows_entry = call.handles.size();
    if (batch.relay != nullptr) call.handles.push_back(batch.shown_rows.handle);
  }
  call.queue = [batches = std::move(batches), queue = std::move(queue)](
                   const CudaRank::Agreed& agreed) { queue(agreed, batches); };
  return ready(std::move(call));
}

void CudaPacked::exchange(const CudaRank::Agreed& agreed, Operation operation,
                          std::span<const RowBatch> batches) {
  for (const RowBatch& batch : batches) {
    if (!batch.is_packed) continue;
    launch_move_rows({.from = batch.from,
                      .from_index = batch.from_index,
                      .to = bytes(batch.packed),
                      .to_index = nullptr,
                      .num_rows = batch.traffic->num_sent,
                      .row_bytes = batch.row_bytes},
                     rank_.stream());
  }
  transfer(agreed, operation, batches);
  for (const RowBatch& batch : batches) {
    if (batch.relay != nullptr && !batch.is_read) scatter_near(agreed, operation, batch);
    launch_move_rows({.from = bytes(batch.arrived),
                      .from_index = batch.arrival_index,
                      .to = batch.to,
                      .to_index = batch.to_index,
                      .num_rows = batch.num_unpacked,
                      .row_bytes = batch.row_bytes},
                     rank_.stream());
  }
}

void CudaPacked::transfer(const CudaRank::Agreed& agreed, Operation operation,
                          std::span<const RowBatch> batches) {
  std::vector<RowTransfer> transfers;
  for (const RowBatch& batch : batches) {
    transfers.push_back({.traffic = *batch.traffic,
                         .send = batch.shown.data,
                         .recv = bytes(batch.arrived),
                         .row_bytes = batch.row_bytes,
                         .operation = operation});
  }
  EventRecorder::Scope recorded(group().recorder(), agreed.operation, agreed.sequence,
                                bytes_to_others(transfers, group().rank()), "exchange");
  recorded.set_peers(peers_of(transfers, group().rank()));
  transport_->run(agreed, batches[0].entry, transfers);
}

// Scatters this rank's tokens and the received copies into the rows of this node.
void CudaPacked::scatter_near(const CudaRank::Agreed& agreed, Operation operation,
                              const RowBatch& batch) {
  const cudaStream_t stream = rank_.stream();
  const RelayPlan& relay = *batch.relay;
  ScatterArgs scatter{};
  scatter.K = relay.K;
  scatter.num_parts = 1;
  scatter.parts[0].row_bytes = batch.row_bytes;
  rank_.reach_near(agreed, batch.rows_entry, scatter.parts[0].rows.known);
  scatter.operation = operation;
  launch_barrier(rank_.near_signals(), operation, stream);
  scatter.targets = relay.near_targets;
  scatter.T = batch.num_tokens;
  scatter.parts[0].tokens = batch.from;
  scatter.signals = rank_.local_signals();
  launch_scatter(scatter, rank_.max_sms(), stream);
  scatter.targets = relay.copy_targets;
  scatter.T = relay.copies.num_received;
  scatter.parts[0].tokens = bytes(batch.arrived);
  scatter.signals = rank_.near_signals();
  launch_scatter(scatter, rank_.max_sms(), stream);
  rank_.fetch(batch.shown_rows);
}

void CudaPacked::zero_pads(const Plan& plan, const RowBatch& batch) const {
  std::byte* rows = batch.relay != nullptr ? batch.shown_rows.data : batch.to;
  rank_.zero_pads(device_plan(plan), rows, batch.row_bytes);
}

// Sums the received rows and, within a node, rows that are read in place.
void CudaPacked::sum(const CudaRank::Agreed& agreed, const RowBatch& batch,
                     GatherSumKernelArgs& args) {
  if (batch.relay == nullptr) {
    args.rows.known[0] = bytes(batch.arrived);
    args.signals = rank_.local_signals();
  } else {
    args.targets = batch.relay->sum_targets;
    rank_.reach_near(agreed, batch.rows_entry, args.rows.known);
    args.rows.known[rank_.channel_ranks().size()] = bytes(batch.arrived);
    args.signals = rank_.near_signals();
    launch_barrier(args.signals, args.operation, rank_.stream());
  }
  launch_gather_sum(args, rank_.max_sms(), rank_.stream());
}

// A gateway reads the rows of its node, so all ranks there must have written them.
void CudaPacked::sum_partials(const CudaRank::Agreed& agreed, const RowBatch& batch,
                              const Plan& plan, SumGroupsArgs& args) {
  const PartialSumPlan& sums = packed_plan(plan).partial_sums();
  std::byte* const out = args.out;
  if (batch.relay == nullptr) {
    args.rows[0] = batch.from;
  } else {
    rank_.reach_near(agreed, batch.rows_entry, args.rows);
    launch_barrier(rank_.near_signals(), args.operation, rank_.stream());
  }
  const auto launch = [&](const PartialSumPlan::List& list) {
    args.terms = list.terms;
    args.offsets = list.offsets;
    args.N = list.num_sums;
    launch_sum_groups(args, rank_.max_sms(), rank_.stream());
  };
  args.partial_source = -1;
  args.out = bytes(batch.packed);
  args.out_dtype = args.partial_dtype;
  args.signals = rank_.local_signals();
  launch(sums.sent);
  transfer(agreed, args.operation, {&batch, 1});
  if (sums.arrived_source >= 0) args.rows[sums.arrived_source] = bytes(batch.arrived);
  args.partial_source = sums.arrived_source;
  args.out = out;
  args.out_dtype = args.row_dtype;
  if (batch.relay != nullptr) args.signals = rank_.near_signals();
  launch(sums.tokens);
}

}  // namespace crossdock::cuda
