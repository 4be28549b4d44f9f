#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/call.hpp"
#include "dispatch/cuda/gpu_call.hpp"
#include "dispatch/cuda/host_routing.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "dispatch/cuda/packed_path.hpp"
#include "dispatch/path.hpp"
#include "dispatch/strategies/alltoall/alltoall.hpp"
#include "dispatch/strategies/direct/direct.hpp"
#include "dispatch/strategies/direct/plan_inputs.hpp"
#include "dispatch/strategies/list.hpp"
#include "plan/cuda/plan_limits.hpp"
#include "plan/placement.hpp"

namespace crossdock::cuda {
namespace {

std::shared_ptr<PlanData> host_part(const CudaRank& rank, const CudaPlanInputs& inputs,
                                    uint64_t id) {
  auto data = std::make_shared<PlanData>();
  data->T = inputs.T;
  data->K = inputs.shape.K;
  data->E = rank.config().num_experts;
  data->P = rank.group().size();
  data->rank = rank.group().rank();
  data->id = id;
  data->config = rank.context().config;
  data->owner = rank.placement().owner;
  data->experts_by_owner = rank.placement().experts_by_owner;
  data->owner_offsets = rank.placement().owner_offsets;
  return data;
}

// The kernels of a plan show no memory; the memory of its links is shown in a separate exchange.
QueuedCall call_of_plan(const AgreedCall& agreed) {
  QueuedCall call = agreed.queued;
  call.num_shown = 0;
  return call;
}

DispatchChunk local_experts_of(const Plan& plan, int64_t chunk, int64_t num_chunks) {
  const PlanData& data = plan.data();
  return {first_expert_of_chunk(data, data.rank, chunk, num_chunks),
          first_expert_of_chunk(data, data.rank, chunk + 1, num_chunks)};
}

ChunkRows rows_of_chunk(const Plan& plan, int64_t chunk, int64_t num_chunks) {
  const PlanData& data = plan.data();
  // The first expert of a chunk at a rank; -1 if the rank has no more experts.
  const auto first_of = [&](int rank, int64_t i) {
    const auto r = static_cast<size_t>(rank);
    const int64_t place = data.owner_offsets[r] + first_expert_of_chunk(data, rank, i, num_chunks);
    return place < data.owner_offsets[r + 1] ? data.experts_by_owner[static_cast<size_t>(place)]
                                             : -1;
  };
  ChunkRows result{};
  result.segment_starts = device_plan(plan).arrays().segment_starts;
  for (int rank = 0; rank < data.P; ++rank) {
    result.first[rank] = first_of(rank, chunk);
    result.end[rank] = first_of(rank, chunk + 1);
  }
  return result;
}

/// A tensor of rows that peers write.
struct Landing {
  ExposedMemory shown;
  int64_t row_bytes = 0;
};

/// The rows of a dispatch.
struct Landings {
  std::vector<Landing> parts;  // rows, then scales and row weights if the call sends them
  bool are_joined = false;     // one copy of a token arrives per rank
  TensorView row_weights{};    // to be set here, if rows are joined and weights requested
  bool sends_weights = false;  // row weights are among the parts
  bool rows_are_free = false;  // peers may write the rows once they have the plan

  /// Peers must wait for this rank's stream before they write.
  bool need_barrier() const { return !rows_are_free || parts.size() > 1; }
};

ScatterArgs scatter_args(const GpuCall& call, const Plan& plan, const DispatchArgs& args,
                         const Landings& landings) {
  const CudaPlan& arrays = device_plan(plan);
  ScatterArgs scatter{};
  scatter.targets = landings.are_joined ? arrays.links()->rank_targets : arrays.arrays().targets;
  scatter.T = plan.num_tokens();
  scatter.K = arrays.shape().K;
  scatter.signals = call.signals();
  scatter.operation = Operation::kDispatch;
  scatter.num_sharing = call.rank().num_sharing();
  scatter.is_captured = is_capturing(call.stream());
  const auto add_part = [&](const ConstTensorView& tokens) {
    const auto entry = static_cast<size_t>(scatter.num_parts);
    ScatterPart& part = scatter.parts[scatter.num_parts++];
    part.tokens = static_cast<const std::byte*>(tokens.data);
    part.row_bytes = landings.parts[entry].row_bytes;
    call.reach(entry, part.rows);
  };
  add_part(args.x);
  if (args.scales.given()) add_part(args.scales);
  if (landings.sends_weights) {
    scatter.weights = arrays.arrays().weights;
    call.reach(static_cast<size_t>(scatter.num_parts), scatter.row_weights);
  }
  return scatter;
}

// After the scatter: moves every row to its final place.
void complete(const GpuCall& call, const Plan& plan, const Landings& landings) {
  if (landings.are_joined) {
    std::vector<FanOutPart> parts;
    for (const Landing& part : landings.parts) {
      parts.push_back({.rows = part.shown.data, .row_bytes = part.row_bytes});
    }
    queue_fan_out(call, device_plan(plan), parts, landings.row_weights);
  }
  for (const Landing& part : landings.parts) call.fetch(part.shown);
}

// Queues the scatter of a begun dispatch, chunk by chunk. Returns the chunks.
std::vector<PendingChunk> queue_chunks(const GpuCall& call, const Plan& plan, int64_t most_chunks,
                                       const ScatterArgs& scatter, const Landings& landings) {
  const int64_t num_chunks = count_chunks(plan.data(), most_chunks);
  std::vector<PendingChunk> chunks;
  const auto note_chunk = [&](int64_t i) {
    chunks.push_back({.experts = local_experts_of(plan, i, num_chunks), .done = call.mark()});
  };
  // Rows that must be copied or fetched arrive with the last chunk.
  const bool are_in_place =
      !landings.are_joined && std::ranges::none_of(landings.parts, [](const Landing& part) {
        return part.shown.lease != nullptr;
      });
  const AgreedCall& agreed = call.agreed();
  ScatterChunkArgs chunk{
      .scatter = scatter, .rows = {}, .takes_whole_sms = agreed.has_waiting_room};
  for (int64_t i = 0; i < num_chunks; ++i) {
    std::optional<EventRecorder::Scope> recorded;
    if (num_chunks > 1) {
      recorded.emplace(call.rank().group().recorder(), agreed.operation, agreed.sequence, 0,
                       "chunk");
      chunk.rows = rows_of_chunk(plan, i, num_chunks);
    }
    if (num_chunks > 1 || chunk.takes_whole_sms) {
      launch_scatter_chunk(chunk, call.max_sms(), call.stream());
    } else {
      launch_scatter(scatter, call.max_sms(), call.stream());
    }
    chunk.scatter.awaits_peers = false;  // once the first has ended, all ranks' rows are free
    if (are_in_place) note_chunk(i);
  }
  complete(call, plan, landings);
  for (int64_t i = 0; i < num_chunks && !are_in_place; ++i) note_chunk(i);
  return chunks;
}

// Sums the rows of entry 0 of all ranks. own_bytes: size of the rows that this rank shows.
void queue_gather(const GpuCall& call, GatherSumKernelArgs& gather, int64_t own_bytes) {
  const AgreedCall& agreed = call.agreed();
  gather.signals = call.signals();
  call.reach(0, gather.rows);
  gather.num_sharing = call.rank().num_sharing();
  gather.awaits_peers = agreed.has_waiting_room && !agreed.is_queued();
  if (agreed.is_queued()) {
    call.await_peers(gather.operation);
  } else if (!gather.awaits_peers) {
    launch_gather_barrier(gather, own_bytes, call.stream());
  }
  launch_gather_sum(gather, call.max_sms(), call.stream());
}

/// `direct` within a node (and `hierarchical`, which is the same there): plan, scatter, gather_sum.
/// The ranks agree on a call and tell each other where their rows are, on the host or, if hosts run
/// ahead, in kernels (RunAhead). The kernels of a call wait for each other on the GPU.
class CudaDirect final : public GpuPath {
 public:
  /// sums_per_rank: partial sums are made per rank, otherwise for all ranks together.
  CudaDirect(const PathContext& context, int device, bool sums_per_rank);

  /// Make the plan on the GPU if possible.
  Plan plan(const Routing& routing) override;
  Plan plan(const DenseRouting& routing) override;
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) override;
  OwnedTensor gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args,
                         Begun* begun) override;
  CombineBackwardResult combine_backward(const Plan& plan,
                                         const CombineBackwardArgs& args) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) override;

 private:
  bool plans_on_device() const;
  /// Whether plans have links.
  bool has_links() const { return sums_per_rank_ || sends_per_rank_; }
  template <typename AnyRouting>
  Plan plan_on_host(const AnyRouting& routing);
  /// Plans a routing with K slots per token, which make_routing prepares.
  template <typename MakeRouting>
  Plan plan_on_device(int64_t K, const MakeRouting& make_routing);
  template <typename MakeRouting>
  Plan queue_plan(int64_t K, const MakeRouting& make_routing);
  Plan link(Plan plan);

  /// Rows for a dispatch.
  struct TakenRows {
    OwnedTensor rows;
    bool are_free = false;  // peers may write them once they have the plan
  };
  TakenRows take_rows(GpuCall& call, const Plan& plan, const DispatchArgs& args);
  Landings show_rows(GpuCall& call, const Plan& plan, const DispatchArgs& args,
                     const DispatchResult& result) const;

  bool sums_per_rank_;   // partial sums
  bool sends_per_rank_;  // one copy of a token to each rank
  // The hosts meet in the first plan, even if an all_reduce has connected the ranks: it succeeds on
  // all of them or on none, as Dispatcher::agree requires.
  bool has_planned_ = false;
  // The next plan reserves rows for the same dispatch as the last.
  DType last_dtype_ = DType::kBF16;
  bool last_took_rows_ = true;
};

CudaDirect::CudaDirect(const PathContext& context, int device, bool sums_per_rank)
    : GpuPath(context, device,
              {.strategy = context.strategy->name(),
               .waits = Waits::kForAll,
               .uses_rows_in_place = true,
               .may_run_ahead = true}),
      sums_per_rank_(sums_per_rank && config().partial_sums != PartialSums::kNone),
      sends_per_rank_(config().copies == Copies::kPerRank) {
  if (config().copies != Copies::kAuto) return;
  const std::vector<int64_t>& offsets = rank_.placement().owner_offsets;
  for (size_t p = 0; p + 1 < offsets.size(); ++p) {
    // A token can have several rows only on a rank with several experts.
    if (offsets[p + 1] - offsets[p] > 1) sends_per_rank_ = context.spans_gpus;
  }
}

// The host makes plans that drop by weight, which needs a selection per expert, and plans with more
// experts than the GPU has shared memory for.
bool CudaDirect::plans_on_device() const {
  const std::optional<Capacity>& capacity = config().capacity;
  return (!capacity || capacity->policy == DropPolicy::kPosition) &&
         fits_device_plan(config().num_experts, rank_.shared_memory());
}

template <typename AnyRouting>
Plan CudaDirect::plan_on_host(const AnyRouting& routing) {
  const CudaRank::CallScope scope(rank_);
  rank_.join_peers();
  return cuda::plan_on_host(rank_, routing, [&](const Plan& made) {
    const PlanData& data = made.data();
    return std::make_shared<CudaPlan>(rank_.pool(), rank_.plan_inputs(data.T, data.K), data);
  });
}

Plan CudaDirect::plan(const Routing& routing) {
  if (!plans_on_device()) return link(plan_on_host(routing));
  rank_.join_peers();
  return plan_on_device(config().top_k, [&] { return ready_routing(rank_, routing); });
}

Plan CudaDirect::plan(const DenseRouting& routing) {
  if (!plans_on_device()) return link(plan_on_host(routing));
  rank_.join_peers();
  const int64_t K = agree_num_slots(rank_, routing);
  return plan_on_device(K, [&] { return ready_routing(rank_, routing, K); });
}

template <typename MakeRouting>
Plan CudaDirect::plan_on_device(int64_t K, const MakeRouting& make_routing) {
  Plan made = queue_plan(K, make_routing);
  if (config().max_rows) return made;
  rank_.raise_faults();  // the same on all ranks
  return link(std::move(made));
}

template <typename MakeRouting>
Plan CudaDirect::queue_plan(int64_t K, const MakeRouting& make_routing) {
  const std::optional<int64_t>& max_rows = config().max_rows;
  const bool links_now = max_rows && has_links();
  GpuCall call(rank_, {.operation = "plan",
                       .plan = nullptr,
                       .text = context_.config_text +
                               ";weights=fp32;device=cuda;slots=" + std::to_string(K)});
  std::shared_ptr<CudaPlan> arrays;
  ReadyRouting routing;
  PlanShares shares{};
  int32_t* scratch = nullptr;
  ReadyLinks links;
  call.prepare([&] {
    routing = make_routing();
    arrays = std::make_shared<CudaPlan>(rank_.pool(), rank_.plan_inputs(routing.slots.T, K));
    const PlanShape& shape = arrays->shape();
    shares = plan_shares(routing.slots.T, shape.K, shape.E, rank_.num_sharing());
    scratch = reinterpret_cast<int32_t*>(rank_.scratch(PlanScratch::num_words(shares, shape.E) *
                                                       static_cast<int64_t>(sizeof(int32_t))));
    if (max_rows) arrays->set_capacity_rows(*max_rows);
    if (max_rows && last_took_rows_ && group().size() > 1 && !rank_.runs_ahead()) {
      const int64_t row_bytes = config().width * size_of(last_dtype_);
      arrays->set_reserved_rows(rank_.pool().take(*max_rows * row_bytes, rank_.stream()));
    }
    if (links_now) links = ready_links(call, *arrays);
  });
  const AgreedCall& agreed = call.agree({.must_meet = !has_planned_});
  has_planned_ = true;
  call.move([&] {
    if (routing.queue) routing.queue();
    launch_plan({.routing = routing.slots,
                 .shape = arrays->shape(),
                 .plan = arrays->arrays(),
                 .shares = shares,
                 .scratch = PlanScratch::carve(scratch, shares, config().num_experts),
                 .signals = call.signals(),
                 .call = call_of_plan(agreed),
                 .num_sharing = rank_.num_sharing()},
                call.stream());
    if (links_now) {
      if (agreed.is_queued()) call.await_peers(Operation::kPlan);  // shows the links
      queue_links(call, *arrays, links);
    }
    if (!max_rows) arrays->set_capacity_rows(arrays->num_rows());
  });
  auto data = host_part(rank_, arrays->inputs(), agreed.sequence);
  return {std::move(data), nullptr, std::move(arrays)};
}

// Links a plan whose number of rows was not known when the ranks agreed on it. Collective.
Plan CudaDirect::link(Plan plan) {
  if (!has_links()) return plan;
  GpuCall call(rank_, {.operation = "plan", .plan = &plan, .text = "links"});
  ReadyLinks links;
  call.prepare([&] { links = ready_links(call, device_plan(plan)); });
  call.agree({});
  call.move([&] {
    call.await_peers(Operation::kPlan);
    queue_links(call, device_plan(plan), links);
  });
  return plan;
}

DispatchResult CudaDirect::dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) {
  GpuCall call(rank_, {.operation = "dispatch", .plan = &plan, .text = call_text(args)},
               args.on_chunk ? nullptr : begun);  // refused with on_chunk, before it begins
  DispatchResult result;
  Landings landings;
  call.prepare([&] {
    check_dispatch(rank_, plan, args, begun);
    TakenRows taken = take_rows(call, plan, args);
    result.rows = std::move(taken.rows);
    take_outputs(call, plan, args, result);
    landings = show_rows(call, plan, args, result);
    landings.rows_are_free = taken.are_free;
  });
  const AgreedCall& agreed = call.agree(
      {.needs_barrier = landings.need_barrier(), .must_meet = args.on_chunk && begun == nullptr});
  call.move([&] {
    last_dtype_ = args.x.dtype;
    last_took_rows_ = !args.rows.given();
    ScatterArgs scatter = scatter_args(call, plan, args, landings);
    for (const Landing& part : landings.parts) {
      call.zero_pads(device_plan(plan), part.shown.data, part.row_bytes);
    }
    scatter.awaits_peers = agreed.needs_barrier && agreed.has_waiting_room && !agreed.is_queued();
    if (agreed.needs_barrier && !scatter.awaits_peers) call.await_peers(scatter.operation);
    if (call.is_aside()) {
      begun->chunks = queue_chunks(call, plan, args.num_chunks, scatter, landings);
    } else {
      launch_scatter(scatter, call.max_sms(), call.stream());
      complete(call, plan, landings);
    }
  });
  return result;
}

// Uses the plan's own rows if they have not been taken and are large enough.
CudaDirect::TakenRows CudaDirect::take_rows(GpuCall& call, const Plan& plan,
                                            const DispatchArgs& args) {
  if (args.rows.given()) return {.rows = {.view = args.rows, .owner = nullptr}};
  const CudaPlan& arrays = device_plan(plan);
  const Shape shape{plan.capacity_rows(), config().width};
  const int64_t num_bytes = shape.num_elements() * size_of(args.x.dtype);
  if (num_bytes == 0 || arrays.landing_bytes() < num_bytes) {
    return {.rows = call.take(args.x.dtype, shape)};
  }
  const Buffer landing = arrays.take_reserved_rows();
  // A graph captured without the plan writes the rows again on replay, but does not repeat the
  // plan's exchange first.
  return {.rows = owned_tensor(landing, args.x.dtype, shape),
          .are_free = arrays.inputs().capture_id == capture_id(call.stream())};
}

Landings CudaDirect::show_rows(GpuCall& call, const Plan& plan, const DispatchArgs& args,
                               const DispatchResult& result) const {
  Landings landings;
  const auto add = [&](const TensorView& rows) {
    landings.parts.push_back(
        {.shown = call.show(rows.data, rows.num_bytes(), /*with_contents=*/false),
         .row_bytes = rows.row_bytes()});
  };
  // A token's first row on a rank may belong to a later chunk than its others.
  const bool is_whole = !call.is_aside() || count_chunks(plan.data(), args.num_chunks) == 1;
  landings.are_joined = sends_per_rank_ && is_whole;
  landings.sends_weights = args.with_row_weights && !landings.are_joined;
  add(result.rows.view);
  if (args.scales.given()) add(result.row_scales.view);
  if (landings.sends_weights) add(result.row_weights.view);
  if (landings.are_joined) landings.row_weights = result.row_weights.view;
  return landings;
}

// With sums per rank, each rank sums its rows of every token; the source then reads one row per
// rank.
OwnedTensor CudaDirect::gather_sum(const char* operation, const Plan& plan,
                                   const GatherSumArgs& args, Begun* begun) {
  GpuCall call(rank_, {.operation = operation, .plan = &plan, .text = call_text(args)}, begun);
  OwnedTensor out;
  OwnedTensor partials;
  ExposedMemory shown;
  call.prepare([&] {
    check_args(plan, args, rank_.where());
    out = output_or_new(call, args.out, args.rows.dtype, {plan.num_tokens(), config().width});
    ConstTensorView rows = args.rows;
    if (sums_per_rank_) {
      partials = call.take(partial_dtype(config().partial_sums, rows.dtype), rows.shape);
      rows = partials.view;
    }
    shown = call.show(rows.data, rows.num_bytes(), /*with_contents=*/!sums_per_rank_);
  });
  call.agree({});
  call.move([&] {
    const CudaPlan& arrays = device_plan(plan);
    GatherSumKernelArgs gather = sum_args(operation, plan, args, out.view);
    if (sums_per_rank_) {
      queue_partial_sums(call, arrays, args, partials.view);
      gather.targets = arrays.links()->rank_targets;
      gather.weights = nullptr;
      gather.dtype = partials.view.dtype;
    } else {
      gather.targets = arrays.arrays().targets;
      gather.whole_sum = config().partial_sums;
    }
    queue_gather(call, gather, shown.num_bytes);
  });
  return out;
}

CombineBackwardResult CudaDirect::combine_backward(const Plan& plan,
                                                   const CombineBackwardArgs& args) {
  GpuCall call(rank_, {.operation = "combine_backward", .plan = &plan, .text = call_text(args)});
  CombineBackwardResult result;
  ExposedMemory y;
  ExposedMemory grad;
  call.prepare([&] {
    check_args(plan, args, rank_.where());
    take_outputs(call, plan, args, result);
    const TensorView& grad_rows = result.grad_rows.view;
    y = call.show(args.y.data, args.y.num_bytes(), /*with_contents=*/true);
    grad = call.show(grad_rows.data, grad_rows.num_bytes(), /*with_contents=*/false);
  });
  call.agree({});
  call.move([&] {
    const CudaPlan& arrays = device_plan(plan);
    GatherSumBackwardArgs backward{};
    backward.targets = arrays.arrays().targets;
    backward.weights = arrays.arrays().weights;
    backward.T = plan.num_tokens();
    backward.K = arrays.shape().K;
    backward.D = static_cast<int32_t>(config().width);
    backward.dtype = args.y.dtype;
    backward.grad_out = static_cast<const std::byte*>(args.grad_out.data);
    backward.grad_weights = static_cast<float*>(result.grad_weights.view.data);
    backward.signals = call.signals();
    call.reach(0, backward.y);
    call.reach(1, backward.grad_rows);
    call.zero_pads(arrays, grad.data, result.grad_rows.view.row_bytes());
    call.await_peers(Operation::kCombineBackward);
    launch_gather_sum_backward(backward, call.max_sms(), call.stream());
    call.fetch(grad);
  });
  return result;
}

OwnedTensor CudaDirect::collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) {
  GpuCall call(rank_,
               {.operation = "collect_routes", .plan = &plan, .text = call_text_of_routes(rows)});
  OwnedTensor result;
  ExposedMemory shown;
  call.prepare([&] {
    check_collected(plan, rows, routes, rank_.where());
    result = output_or_new(call, routes, rows.dtype, {plan.num_tokens(), plan.data().K});
    shown = call.show(rows.data, rows.num_bytes(), /*with_contents=*/true);
  });
  call.agree({});
  call.move([&] {
    GatherRoutesArgs values{};
    values.targets = device_plan(plan).arrays().targets;
    values.num_routes = result.view.num_elements();
    values.routes = static_cast<float*>(result.view.data);
    values.signals = call.signals();
    call.reach(0, values.rows);
    call.await_peers(Operation::kRouteValues);
    launch_gather_routes(values, call.stream());
  });
  return result;
}

}  // namespace

// Within one node all ranks reach each other's rows; between nodes copies are exchanged. If GPUs of
// a node do not reach each other, all rows are exchanged, as in alltoall.
std::unique_ptr<Path> make_direct_path(const PathContext& context, int device, bool sums_per_rank) {
  if (!context.gpus_reach_each_other) {
    PathContext exchanging = context;
    exchanging.strategy = make_alltoall();
    return make_packed_path(exchanging, device, alltoall_packing());
  }
  if (context.group.topology().num_nodes <= 1) {
    return std::make_unique<CudaDirect>(context, device, sums_per_rank);
  }
  return make_packed_path(context, device, relay_packing());
}

}  // namespace crossdock::cuda

namespace crossdock {

std::unique_ptr<Path> make_direct_device_path(const PathContext& context, Device device) {
  return cuda::make_direct_path(context, device.index, /*sums_per_rank=*/context.group.size() > 1);
}

}  // namespace crossdock
