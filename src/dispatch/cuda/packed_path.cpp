#include "dispatch/cuda/packed_path.hpp"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/call.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/gpu_call.hpp"
#include "dispatch/cuda/host_routing.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"

namespace crossdock::cuda {
namespace {

/// A plan's arrays, and the data of its exchanges.
class PackedPlan final : public CudaPlan {
 public:
  PackedPlan(CudaRank& rank, const PlanData& data, std::span<const int64_t> arrival_tokens)
      : CudaPlan(rank.pool(), rank.plan_inputs(data.T, data.K), data),
        exchange_(
            make_exchange_plan(rank.pool(), data, arrival_tokens, rank.stream(), rank.watch())) {}

  const ExchangePlan& exchange() const { return exchange_; }

  void set_relay(RelayPlan relay) { relay_ = std::move(relay); }
  /// Null if tokens are not relayed.
  const RelayPlan* relay() const { return relay_ ? &*relay_ : nullptr; }

  void set_partial_sums(PartialSumPlan sums) { partial_sums_ = std::move(sums); }
  /// REQUIRES: set.
  const PartialSumPlan& partial_sums() const { return *partial_sums_; }

 private:
  ExchangePlan exchange_;
  std::optional<RelayPlan> relay_;
  std::optional<PartialSumPlan> partial_sums_;
};

/// Rows that are exchanged together: packed[i] = from[from_index[i]] before the exchange, and
/// to[to_index[i]] = arrived[arrival_index[i]] after it. A null index means i.
struct RowBatch {
  const RowTraffic* traffic = nullptr;
  const std::byte* from = nullptr;
  const int64_t* from_index = nullptr;
  bool is_packed = true;  // false: `from` itself is sent
  std::byte* to = nullptr;
  const int64_t* to_index = nullptr;
  const int64_t* arrival_index = nullptr;
  int64_t num_unpacked = 0;  // rows written to `to`
  int64_t row_bytes = 0;
  OwnedTensor packed{};   // [num_sent, row_bytes]
  OwnedTensor arrived{};  // [num_received, row_bytes]
  ExposedMemory shown{};

  // For relayed tokens, and for rows that are read in place.
  const RelayPlan* relay = nullptr;
  bool is_read = false;        // rows are read; otherwise tokens are written there
  int64_t num_tokens = 0;      // at `from`
  const void* rows = nullptr;  // used by the ranks of this node
  int64_t rows_bytes = 0;
  ExposedMemory shown_rows{};
};

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

// REQUIRES: a packed path made the plan.
const PackedPlan& packed_plan(const Plan& plan) {
  return static_cast<const PackedPlan&>(*plan.device_data());
}

std::byte* bytes(const OwnedTensor& tensor) {
  return static_cast<std::byte*>(tensor.view.data);
}

RowBatch tokens_to_rows(const Packing& packing, const Plan& plan, const ConstTensorView& tokens,
                        const TensorView& rows) {
  RowBatch batch{.from = static_cast<const std::byte*>(tokens.data), .row_bytes = rows.row_bytes()};
  if (packing.relay) {
    batch.relay = packed_plan(plan).relay();
    batch.traffic = &batch.relay->copies;
    batch.from_index = batch.relay->copy_tokens;
    batch.num_tokens = plan.num_tokens();
    batch.rows = rows.data;
    batch.rows_bytes = rows.num_bytes();
    return batch;
  }
  const ExchangePlan& exchange = packed_plan(plan).exchange();
  batch.traffic = packing.arrival_tokens ? &exchange.tokens : &exchange.out;
  batch.from_index = exchange.sent_tokens;
  batch.is_packed = !packing.arrival_tokens;
  batch.to = static_cast<std::byte*>(rows.data);
  batch.to_index = exchange.arrival_rows;
  batch.arrival_index = packing.arrival_tokens ? exchange.arrival_tokens : nullptr;
  batch.num_unpacked = exchange.out.num_received;
  return batch;
}

RowBatch routes_to_rows(const Plan& plan, const ConstTensorView& routes, const TensorView& rows) {
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
RowBatch rows_to_tokens(const Packing& packing, const Plan& plan, const ConstTensorView& rows) {
  const ExchangePlan& exchange = packed_plan(plan).exchange();
  RowBatch batch{.traffic = &exchange.home,
                 .from = static_cast<const std::byte*>(rows.data),
                 .from_index = exchange.arrival_rows,
                 .row_bytes = rows.row_bytes()};
  if (packing.relay && rows.shape.rank() == 2) {  // single numbers are not relayed
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
RowBatch partial_sums_to_tokens(const Packing& packing, const Plan& plan,
                                const ConstTensorView& rows) {
  const DispatchConfig& config = *plan.data().config;
  const DType dtype = partial_dtype(config.partial_sums, rows.dtype);
  RowBatch batch{.traffic = &packed_plan(plan).partial_sums().traffic,
                 .from = static_cast<const std::byte*>(rows.data),
                 .row_bytes = config.width * size_of(dtype)};
  if (packing.relay) {
    batch.relay = packed_plan(plan).relay();
    batch.is_read = true;
    batch.rows = rows.data;
    batch.rows_bytes = rows.num_bytes();
  }
  return batch;
}

// Takes the memory of the batches and shows it to the peers: `shown` first, as transports expect
// their entries to be contiguous.
void take_memory(GpuCall& call, std::span<RowBatch> batches) {
  for (RowBatch& batch : batches) {
    const RowTraffic& traffic = *batch.traffic;
    const void* sent = batch.from;
    if (batch.is_packed) {
      batch.packed = call.take(DType::kU8, {traffic.num_sent, batch.row_bytes});
      sent = batch.packed.view.data;
    }
    batch.shown = call.show(sent, traffic.num_sent * batch.row_bytes,
                            /*with_contents=*/!batch.is_packed);
    batch.arrived = call.take(DType::kU8, {traffic.num_received, batch.row_bytes});
  }
  for (RowBatch& batch : batches) {
    if (batch.relay == nullptr) continue;
    batch.shown_rows = call.show(batch.rows, batch.rows_bytes, /*with_contents=*/batch.is_read);
  }
}

// Exchanges packed batches.
void transfer(const GpuCall& call, RowTransport& transport, Operation operation,
              std::span<const RowBatch> batches) {
  std::vector<RowTransfer> transfers;
  for (const RowBatch& batch : batches) {
    transfers.push_back({.traffic = *batch.traffic,
                         .send = batch.shown.data,
                         .recv = bytes(batch.arrived),
                         .row_bytes = batch.row_bytes,
                         .operation = operation});
  }
  const AgreedCall& agreed = call.agreed();
  EventRecorder::Scope recorded(call.rank().group().recorder(), agreed.operation, agreed.sequence,
                                bytes_to_others(transfers, call.rank().group().rank()), "exchange");
  recorded.set_peers(peers_of(transfers, call.rank().group().rank()));
  transport.run(call, batches[0].shown.entry, transfers);
}

// Scatters this rank's tokens and the received copies into the rows of this node.
void scatter_near(const GpuCall& call, Operation operation, const RowBatch& batch) {
  const cudaStream_t stream = call.stream();
  const RelayPlan& relay = *batch.relay;
  ScatterArgs scatter{};
  scatter.K = relay.K;
  scatter.num_parts = 1;
  scatter.parts[0].row_bytes = batch.row_bytes;
  call.reach_near(batch.shown_rows.entry, scatter.parts[0].rows.known);
  scatter.operation = operation;
  launch_barrier(call.near_signals(), operation, stream);
  scatter.targets = relay.near_targets;
  scatter.T = batch.num_tokens;
  scatter.parts[0].tokens = batch.from;
  scatter.signals = call.local_signals();
  launch_scatter(scatter, call.max_sms(), stream);
  scatter.targets = relay.copy_targets;
  scatter.T = relay.copies.num_received;
  scatter.parts[0].tokens = bytes(batch.arrived);
  scatter.signals = call.near_signals();
  launch_scatter(scatter, call.max_sms(), stream);
  call.fetch(batch.shown_rows);
}

// Packs, exchanges and unpacks batches with contiguous entries.
void exchange(const GpuCall& call, RowTransport& transport, Operation operation,
              std::span<const RowBatch> batches) {
  for (const RowBatch& batch : batches) {
    if (!batch.is_packed) continue;
    launch_move_rows({.from = batch.from,
                      .from_index = batch.from_index,
                      .to = bytes(batch.packed),
                      .to_index = nullptr,
                      .num_rows = batch.traffic->num_sent,
                      .row_bytes = batch.row_bytes},
                     call.stream());
  }
  transfer(call, transport, operation, batches);
  for (const RowBatch& batch : batches) {
    if (batch.relay != nullptr && !batch.is_read) scatter_near(call, operation, batch);
    launch_move_rows({.from = bytes(batch.arrived),
                      .from_index = batch.arrival_index,
                      .to = batch.to,
                      .to_index = batch.to_index,
                      .num_rows = batch.num_unpacked,
                      .row_bytes = batch.row_bytes},
                     call.stream());
  }
}

// Zeroes the pad rows of a batch's destination.
void zero_pads(const GpuCall& call, const Plan& plan, const RowBatch& batch) {
  std::byte* rows = batch.relay != nullptr ? batch.shown_rows.data : batch.to;
  call.zero_pads(device_plan(plan), rows, batch.row_bytes);
}

// Sums the received rows and, within a node, rows that are read in place.
void sum(const GpuCall& call, const RowBatch& batch, GatherSumKernelArgs& args) {
  if (batch.relay == nullptr) {
    args.rows.known[0] = bytes(batch.arrived);
    args.signals = call.local_signals();
  } else {
    args.targets = batch.relay->sum_targets;
    call.reach_near(batch.shown_rows.entry, args.rows.known);
    args.rows.known[call.rank().channel_ranks().size()] = bytes(batch.arrived);
    args.signals = call.near_signals();
    launch_barrier(args.signals, args.operation, call.stream());
  }
  launch_gather_sum(args, call.max_sms(), call.stream());
}

// A gateway reads the rows of its node, so all ranks there must have written them.
void sum_partials(const GpuCall& call, RowTransport& transport, const RowBatch& batch,
                  const Plan& plan, const GatherSumArgs& wanted) {
  const PartialSumPlan& sums = packed_plan(plan).partial_sums();
  SumGroupsArgs args{};
  args.D = static_cast<int32_t>(wanted.out.shape[1]);
  args.row_dtype = wanted.rows.dtype;
  args.partial_dtype = partial_dtype(plan.data().config->partial_sums, wanted.rows.dtype);
  args.is_weighted = wanted.weights.given();
  args.operation = operation_of(call.agreed().operation);
  if (batch.relay == nullptr) {
    args.rows[0] = batch.from;
  } else {
    call.reach_near(batch.shown_rows.entry, args.rows);
    launch_barrier(call.near_signals(), args.operation, call.stream());
  }
  const auto launch = [&](const PartialSumPlan::List& list) {
    args.terms = list.terms;
    args.offsets = list.offsets;
    args.N = list.num_sums;
    launch_sum_groups(args, call.max_sms(), call.stream());
  };
  args.partial_source = -1;
  args.out = bytes(batch.packed);
  args.out_dtype = args.partial_dtype;
  args.signals = call.local_signals();
  launch(sums.sent);
  transfer(call, transport, args.operation, {&batch, 1});
  if (sums.arrived_source >= 0) args.rows[sums.arrived_source] = bytes(batch.arrived);
  args.partial_source = sums.arrived_source;
  args.out = static_cast<std::byte*>(wanted.out.data);
  args.out_dtype = args.row_dtype;
  if (batch.relay != nullptr) args.signals = call.near_signals();
  launch(sums.tokens);
}

// Writes one number per sent route, and 0 for the others.
void unpack_routes(const GpuCall& call, const Plan& plan, const RowBatch& batch,
                   const TensorView& routes) {
  if (routes.num_bytes() > 0) {
    CROSSDOCK_CUDA(
        cudaMemsetAsync(routes.data, 0, static_cast<size_t>(routes.num_bytes()), call.stream()));
  }
  launch_move_rows({.from = static_cast<const std::byte*>(batch.arrived.view.data),
                    .from_index = nullptr,
                    .to = static_cast<std::byte*>(routes.data),
                    .to_index = packed_plan(plan).exchange().sent_routes,
                    .num_rows = batch.traffic->num_received,
                    .row_bytes = batch.row_bytes},
                   call.stream());
}

/// Inputs and results of combine_backward, one entry per row.
struct GradientRows {
  OwnedTensor grad_out;      // [R, D]
  OwnedTensor weights;       // [R]
  OwnedTensor grad_weights;  // [R]
};

void make_gradients(const GpuCall& call, const Plan& plan, const ConstTensorView& y,
                    const GradientRows& rows, const TensorView& grad_rows) {
  GatherSumBackwardArgs backward{};
  backward.targets = packed_plan(plan).exchange().row_targets;
  backward.weights = static_cast<const float*>(rows.weights.view.data);
  backward.T = plan.capacity_rows();
  backward.K = 1;
  backward.D = static_cast<int32_t>(y.shape[1]);
  backward.dtype = y.dtype;
  backward.grad_out = static_cast<const std::byte*>(rows.grad_out.view.data);
  backward.y.known[0] = static_cast<const std::byte*>(y.data);
  backward.grad_rows.known[0] = static_cast<std::byte*>(grad_rows.data);
  backward.grad_weights = static_cast<float*>(rows.grad_weights.view.data);
  backward.signals = call.local_signals();
  launch_gather_sum_backward(backward, call.max_sms(), call.stream());
}

/// The path; see make_packed_path.
class PackedPath final : public GpuPath {
 public:
  PackedPath(const PathContext& context, int device, const Packing& packing, Waits waits,
             const MakeTransport& make_transport);

  Plan plan(const Routing& routing) override { return plan_on_host(routing); }
  Plan plan(const DenseRouting& routing) override { return plan_on_host(routing); }
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) override;
  OwnedTensor gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args,
                         Begun* begun) override;
  CombineBackwardResult combine_backward(const Plan& plan,
                                         const CombineBackwardArgs& args) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) override;

 private:
  /// `begun` if begun calls run concurrently with the caller's stream, else null.
  Begun* aside(Begun* begun) const;
  template <typename AnyRouting>
  Plan plan_on_host(const AnyRouting& routing);
  /// Copies to the GPU the parts of a host plan that calls need.
  std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan);

  Packing packing_;
  std::unique_ptr<RowTransport> transport_;
};

PackedPath::PackedPath(const PathContext& context, int device, const Packing& packing, Waits waits,
                       const MakeTransport& make_transport)
    : GpuPath(context, device,
              {.strategy = context.strategy->name(),
               .waits = waits,
               .uses_rows_in_place = packing.relay != nullptr}),
      packing_(packing),
      transport_(make_transport(rank_)) {}

// A call has several kernels that wait for peers, with others queued behind them. Layers whose
// ranks share a GPU have stalled with such kernels in two streams per rank; the cause is unknown.
Begun* PackedPath::aside(Begun* begun) const {
  const bool runs_aside = !context_.ranks_share_gpus || !uses_peer_memory(context_);
  return runs_aside ? begun : nullptr;
}

template <typename AnyRouting>
Plan PackedPath::plan_on_host(const AnyRouting& routing) {
  const CudaRank::CallScope scope(rank_);
  rank_.join_peers();
  transport_->connect();
  return cuda::plan_on_host(rank_, routing, [&](const Plan& made) { return upload(made); });
}

std::shared_ptr<const DevicePlanData> PackedPath::upload(const Plan& host_plan) {
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

DispatchResult PackedPath::dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) {
  GpuCall call(rank_, {.operation = "dispatch", .plan = &plan, .text = call_text(args)},
               args.on_chunk ? nullptr : aside(begun));  // refused with on_chunk
  DispatchResult result;
  std::vector<RowBatch> batches;
  call.prepare([&] {
    check_dispatch(rank_, plan, args, begun);
    result.rows =
        output_or_new(call, args.rows, args.x.dtype, {plan.capacity_rows(), config().width});
    take_outputs(call, plan, args, result);
    batches.push_back(tokens_to_rows(packing_, plan, args.x, result.rows.view));
    if (args.scales.given()) {
      batches.push_back(tokens_to_rows(packing_, plan, args.scales, result.row_scales.view));
    }
    if (args.with_row_weights) {
      batches.push_back(routes_to_rows(plan, plan.weights(), result.row_weights.view));
    }
    transport_->check_usable(call);
    take_memory(call, batches);
  });
  call.agree({.must_meet = args.on_chunk && begun == nullptr});
  call.move([&] {
    for (const RowBatch& batch : batches) zero_pads(call, plan, batch);
    exchange(call, *transport_, Operation::kDispatch, batches);
  });
  return result;
}

OwnedTensor PackedPath::gather_sum(const char* operation, const Plan& plan,
                                   const GatherSumArgs& args, Begun* begun) {
  GpuCall call(rank_, {.operation = operation, .plan = &plan, .text = call_text(args)},
               aside(begun));
  const bool is_partial = config().partial_sums != PartialSums::kNone;
  OwnedTensor out;
  std::vector<RowBatch> batches;
  call.prepare([&] {
    check_args(plan, args, rank_.where());
    out = output_or_new(call, args.out, args.rows.dtype, {plan.num_tokens(), config().width});
    batches.push_back(is_partial ? partial_sums_to_tokens(packing_, plan, args.rows)
                                 : rows_to_tokens(packing_, plan, args.rows));
    transport_->check_usable(call);
    take_memory(call, batches);
  });
  call.agree({});
  call.move([&] {
    if (is_partial) {
      const GatherSumArgs wanted{.rows = args.rows, .weights = args.weights, .out = out.view};
      return sum_partials(call, *transport_, batches[0], plan, wanted);
    }
    GatherSumKernelArgs gather = sum_args(operation, plan, args, out.view);
    exchange(call, *transport_, gather.operation, batches);
    gather.targets = packed_plan(plan).exchange().sum_targets;
    sum(call, batches[0], gather);
  });
  return out;
}

// Sends grad_out and the weights to the rows, computes both gradients there and returns the weight
// gradients.
CombineBackwardResult PackedPath::combine_backward(const Plan& plan,
                                                   const CombineBackwardArgs& args) {
  GpuCall call(rank_, {.operation = "combine_backward", .plan = &plan, .text = call_text(args)});
  CombineBackwardResult result;
  GradientRows rows;
  std::vector<RowBatch> batches;
  call.prepare([&] {
    check_args(plan, args, rank_.where());
    take_outputs(call, plan, args, result);
    const int64_t R = plan.capacity_rows();
    rows = {.grad_out = call.take(args.y.dtype, args.y.shape),
            .weights = call.take(DType::kF32, {R}),
            .grad_weights = call.take(DType::kF32, {R})};
    batches = {tokens_to_rows(packing_, plan, args.grad_out, rows.grad_out.view),
               routes_to_rows(plan, plan.weights(), rows.weights.view),
               rows_to_tokens(packing_, plan, rows.grad_weights.view)};
    transport_->check_usable(call);
    take_memory(call, batches);
  });
  call.agree({});
  call.move([&] {
    const std::span<const RowBatch> all(batches);
    for (const RowBatch& batch : all.first(2)) zero_pads(call, plan, batch);
    exchange(call, *transport_, Operation::kCombineBackward, all.first(2));
    make_gradients(call, plan, args.y, rows, result.grad_rows.view);
    exchange(call, *transport_, Operation::kCombineBackward, all.last(1));
    unpack_routes(call, plan, all.back(), result.grad_weights.view);
  });
  return result;
}

OwnedTensor PackedPath::collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) {
  GpuCall call(rank_,
               {.operation = "collect_routes", .plan = &plan, .text = call_text_of_routes(rows)});
  OwnedTensor result;
  std::vector<RowBatch> batches;
  call.prepare([&] {
    check_collected(plan, rows, routes, rank_.where());
    result = output_or_new(call, routes, rows.dtype, {plan.num_tokens(), plan.data().K});
    batches.push_back(rows_to_tokens(packing_, plan, rows));
    transport_->check_usable(call);
    take_memory(call, batches);
  });
  call.agree({});
  call.move([&] {
    exchange(call, *transport_, Operation::kRouteValues, batches);
    unpack_routes(call, plan, batches[0], result.view);
  });
  return result;
}

Error no_nccl_error(const PathContext& context) {
  const bool is_needed = context.options.nccl_comm == nullptr;
  return {
      ErrorCode::kUnsupported,
      concat("this build has no NCCL",
             is_needed ? ", and ranks on several nodes cannot reach each other's GPU memory" : "",
             "; configure with CROSSDOCK_WITH_NCCL=ON where nccl.h is installed")};
}

}  // namespace

std::unique_ptr<Path> make_packed_path(const PathContext& context, int device,
                                       const Packing& packing,
                                       const MakeTransport& make_transport) {
  Waits waits = packing.relay ? Waits::kForNode : Waits::kNone;
  if (make_transport) {
    return std::make_unique<PackedPath>(context, device, packing, waits, make_transport);
  }
  if (uses_peer_memory(context)) waits = Waits::kForAll;
  return std::make_unique<PackedPath>(context, device, packing, waits, [&](CudaRank& rank) {
    if (uses_nccl(context)) {
      if constexpr (CROSSDOCK_HAS_NCCL) {
        return make_nccl_transport(rank, context.options.nccl_comm);
      }
      throw no_nccl_error(context);
    }
    return uses_peer_memory(context) ? make_peer_copies() : make_staged_copies(rank);
  });
}

}  // namespace crossdock::cuda
