#include "dispatch/strategies/direct/cuda_direct.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/kernels/gather_routes.hpp"
#include "dispatch/cuda/kernels/gather_sum_backward.hpp"
#include "dispatch/cuda/kernels/scatter_chunk.hpp"
#include "dispatch/cuda/row_links.hpp"
#include "plan/cuda/plan_limits.hpp"
#include "plan/expert_chunks.hpp"

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

}  // namespace

CudaDirect::CudaDirect(const PathContext& context, int device, bool sums_per_rank)
    : CudaPath(context, device,
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
         fits_device_plan(config().num_experts, shared_memory_per_block(rank_.device()));
}

std::shared_ptr<const DevicePlanData> CudaDirect::upload(const Plan& host_plan) {
  const PlanData& data = host_plan.data();
  return std::make_shared<CudaPlan>(rank_.pool(), rank_.plan_inputs(data.T, data.K), data);
}

Plan CudaDirect::plan(const Routing& routing) {
  if (!plans_on_device()) return link(CudaPath::plan(routing));
  rank_.meet();
  return plan_on_device(config().top_k, [&] { return ready_routing(rank_, routing); });
}

Plan CudaDirect::plan(const DenseRouting& routing) {
  if (!plans_on_device()) return link(CudaPath::plan(routing));
  rank_.meet();
  const int64_t K = agree_num_slots(rank_, routing);
  return plan_on_device(K, [&] { return ready_routing(rank_, routing, K); });
}

Plan CudaDirect::plan_on_device(int64_t K, const std::function<ReadyRouting()>& make_routing) {
  const std::optional<int64_t>& max_rows = config().max_rows;
  std::shared_ptr<CudaPlan> arrays;
  std::string text = context().config_text + ";weights=fp32;device=cuda;slots=";
  text += std::to_string(K);
  const Call call{.operation = "plan", .plan = nullptr, .text = std::move(text)};
  const uint64_t id = run(call, [&] {
    ReadyRouting routing = make_routing();
    arrays = std::make_shared<CudaPlan>(rank_.pool(), rank_.plan_inputs(routing.slots.T, K));
    const PlanShape& shape = arrays->shape();
    const PlanShares shares = plan_shares(routing.slots.T, shape.K, shape.E, rank_.num_sharing());
    auto* const scratch = reinterpret_cast<int32_t*>(rank_.scratch(
        PlanScratch::num_words(shares, shape.E) * static_cast<int64_t>(sizeof(int32_t))));
    if (max_rows) arrays->set_capacity_rows(*max_rows);
    if (max_rows && reserves_rows_ && group().size() > 1 && !rank_.runs_ahead()) {
      const int64_t row_bytes = config().width * size_of(row_dtype_);
      arrays->set_reserved_rows(rank_.pool().take(*max_rows * row_bytes, rank_.stream()));
    }
    ReadyLinks links;
    std::vector<MemoryHandle> handles;
    if (max_rows && has_links()) {
      links = ready_links(rank_, *arrays);
      handles.push_back(links.shown.handle);
    }
    const auto queue = [&, shares, scratch, links,
                        routing = std::move(routing)](const CudaRank::Agreed& agreed) {
      if (routing.queue) routing.queue();
      launch_plan({.routing = routing.slots,
                   .shape = arrays->shape(),
                   .plan = arrays->arrays(),
                   .shares = shares,
                   .scratch = PlanScratch::carve(scratch, shares, config().num_experts),
                   .signals = rank_.signals(),
                   .call = call_of_plan(agreed),
                   .num_sharing = rank_.num_sharing()},
                  rank_.stream());
      if (max_rows && has_links()) {
        if (agreed.is_queued()) rank_.await_peers(agreed, Operation::kPlan);  // shows the links
        queue_links(rank_, agreed, *arrays, links);
      }
      if (!max_rows) arrays->set_capacity_rows(arrays->num_rows());
    };
    return ready({.handles = std::move(handles), .queue = queue});
  });
  if (!max_rows) rank_.raise_faults();  // the same on all ranks
  auto data = host_part(rank_, arrays->inputs(), id);
  Plan made(std::move(data), nullptr, std::move(arrays));
  return max_rows ? made : link(std::move(made));
}

// Links a plan whose number of rows was not known when the ranks agreed on it. Collective.
Plan CudaDirect::link(Plan plan) {
  if (!has_links()) return plan;
  run({.operation = "plan", .plan = &plan, .text = "links"}, [&] {
    const CudaPlan& arrays = device_plan(plan);
    ReadyLinks links = ready_links(rank_, arrays);
    CudaCall call{.handles = {links.shown.handle}};
    call.queue = [this, &arrays, links = std::move(links)](const CudaRank::Agreed& agreed) {
      rank_.await_peers(agreed, Operation::kPlan);
      queue_links(rank_, agreed, arrays, links);
    };
    return ready(std::move(call));
  });
  return plan;
}

// Uses the plan's own rows if they have not been taken and are large enough.
OwnedTensor CudaDirect::take_dispatch_rows(const Plan& plan, DType dtype) {
  const CudaPlan& arrays = device_plan(plan);
  const Shape shape{plan.capacity_rows(), config().width};
  const int64_t num_bytes = shape.num_elements() * size_of(dtype);
  rows_are_free_ = false;
  if (num_bytes == 0 || arrays.landing_bytes() < num_bytes) {
    return CudaPath::take_dispatch_rows(plan, dtype);
  }
  const Buffer landing = arrays.take_reserved_rows();
  // A graph captured without the plan writes the rows again on replay, but does not repeat the
  // plan's exchange first.
  rows_are_free_ = arrays.inputs().capture_id == capture_id(rank_.stream());
  return owned_tensor(landing, dtype, shape);
}

ReadyCall CudaDirect::ready_dispatch(const Plan& plan, const DispatchArgs& args,
                                     const DispatchResult& result) {
  Landings landings;
  const auto add = [&](const TensorView& rows) {
    landings.parts.push_back(
        {.shown = rank_.show(rows.data, rows.num_bytes(), /*with_contents=*/false),
         .row_bytes = rows.row_bytes()});
  };
  // A token's first row on a rank may belong to a later chunk than its others.
  const bool is_whole =
      !rank_.streams().is_aside() || count_chunks(plan.data(), args.num_chunks) == 1;
  landings.are_joined = sends_per_rank_ && is_whole;
  add(result.rows.view);
  if (args.scales.given()) add(result.row_scales.view);
  const bool sends_weights = args.with_row_weights && !landings.are_joined;
  if (sends_weights) add(result.row_weights.view);
  if (landings.are_joined) landings.row_weights = result.row_weights.view;
  CudaCall call;
  for (const Landing& part : landings.parts) call.handles.push_back(part.shown.handle);
  call.queue = [this, &plan, &args, landings = std::move(landings)](
                   const CudaRank::Agreed& agreed) { queue_scatter(agreed, plan, args, landings); };
  const bool is_free = !args.rows.given() && rows_are_free_;
  call.needs_barrier = !is_free || args.scales.given() || sends_weights;
  return ready(std::move(call));
}

void CudaDirect::queue_scatter(const CudaRank::Agreed& agreed, const Plan& plan,
                               const DispatchArgs& args, const Landings& landings) {
  row_dtype_ = args.x.dtype;
  reserves_rows_ = !args.rows.given();
  const CudaPlan& arrays = device_plan(plan);
  ScatterArgs scatter{};
  scatter.targets = landings.are_joined ? arrays.links()->rank_targets : arrays.arrays().targets;
  scatter.T = plan.num_tokens();
  scatter.K = arrays.shape().K;
  scatter.signals = rank_.signals();
  scatter.operation = Operation::kDispatch;
  scatter.num_sharing = rank_.num_sharing();
  scatter.is_captured = is_capturing(rank_.stream());
  const auto add_part = [&](const ConstTensorView& tokens) {
    const auto entry = static_cast<size_t>(scatter.num_parts);
    ScatterPart& part = scatter.parts[scatter.num_parts++];
    part.tokens = static_cast<const std::byte*>(tokens.data);
    part.row_bytes = landings.parts[entry].row_bytes;
    rank_.reach(agreed, entry, part.rows);
  };
  add_part(args.x);
  if (args.scales.given()) add_part(args.scales);
  if (args.with_row_weights && !landings.are_joined) {
    scatter.weights = arrays.arrays().weights;
    rank_.reach(agreed, static_cast<size_t>(scatter.num_parts), scatter.row_weights);
  }
  for (const Landing& part : landings.parts) {
    rank_.zero_pads(arrays, part.shown.data, part.row_bytes);
  }
  scatter.awaits_peers = agreed.needs_barrier && agreed.has_waiting_room && !agreed.is_queued();
  if (agreed.needs_barrier && !scatter.awaits_peers) {
    rank_.await_peers(agreed, scatter.operation);
  }
  if (rank_.streams().is_aside()) {
    queue_chunks(agreed, plan, args.num_chunks, scatter, landings);
  } else {
    launch_scatter(scatter, rank_.max_sms(), rank_.stream());
    complete(plan, landings);
  }
}

// After the scatter: moves every row to its final place.
void CudaDirect::complete(const Plan& plan, const Landings& landings) {
  if (landings.are_joined) {
    std::vector<FanOutPart> parts;
    for (const Landing& part : landings.parts) {
      parts.push_back({.rows = part.shown.data, .row_bytes = part.row_bytes});
    }
    queue_fan_out(rank_, device_plan(plan), parts, landings.row_weights);
  }
  for (const Landing& part : landings.parts) rank_.fetch(part.shown);
}

void CudaDirect::queue_chunks(const CudaRank::Agreed& agreed, const Plan& plan, int64_t most_chunks,
                              const ScatterArgs& scatter, const Landings& landings) {
  const int64_t num_chunks = count_chunks(plan.data(), most_chunks);
  const auto note_chunks = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) note_chunk(local_experts_of(plan, i, num_chunks));
  };
  // Rows that must be copied or fetched arrive with the last chunk.
  const bool are_in_place =
      !landings.are_joined && std::ranges::none_of(landings.parts, [](const Landing& part) {
        return part.shown.lease != nullptr;
      });
  ScatterChunkArgs chunk{
      .scatter = scatter, .rows = {}, .takes_whole_sms = agreed.has_waiting_room};
  for (int64_t i = 0; i < num_chunks; ++i) {
    std::optional<EventRecorder::Scope> recorded;
    if (num_chunks > 1) {
      recorded.emplace(group().recorder(), agreed.operation, agreed.sequence, 0, "chunk");
      chunk.rows = rows_of_chunk(plan, i, num_chunks);
    }
    if (num_chunks > 1 || chunk.takes_whole_sms) {
      launch_scatter_chunk(chunk, rank_.max_sms(), rank_.stream());
    } else {
      launch_scatter(scatter, rank_.max_sms(), rank_.stream());
    }
    chunk.scatter.awaits_peers = false;  // once the first has ended, all ranks' rows are free
    if (are_in_place) note_chunks(i, i + 1);
  }
  complete(plan, landings);
  if (!are_in_place) note_chunks(0, num_chunks);
}

ReadyCall CudaDirect::ready_gather_sum(const char* operation, const Plan& plan,
                                       const GatherSumArgs& args) {
  if (sums_per_rank_) return ready_partial_sums(operation, plan, args);
  ExposedMemory shown = rank_.show(args.rows.data, args.rows.num_bytes(), /*with_contents=*/true);
  CudaCall call{.handles = {shown.handle}};
  call.queue = [this, operation, &plan, args,
                shown = std::move(shown)](const CudaRank::Agreed& agreed) {
    GatherSumKernelArgs gather = sum_args(operation, plan, args);
    gather.targets = device_plan(plan).arrays().targets;
    gather.whole_sum = config().partial_sums;
    queue_gather(agreed, gather, shown.num_bytes);
  };
  return ready(std::move(call));
}

// Each rank sums its rows of every token; the source then reads one row per rank.
ReadyCall CudaDirect::ready_partial_sums(const char* operation, const Plan& plan,
                                         const GatherSumArgs& args) {
  const DType dtype = partial_dtype(config().partial_sums, args.rows.dtype);
  const OwnedTensor partials = rank_.take(dtype, args.rows.shape);
  ExposedMemory shown =
      rank_.show(partials.view.data, partials.view.num_bytes(), /*with_contents=*/false);
  CudaCall call{.handles = {shown.handle}};
  call.queue = [this, operation, &plan, args, partials,
                shown = std::move(shown)](const CudaRank::Agreed& agreed) {
    const CudaPlan& arrays = device_plan(plan);
    queue_partial_sums(rank_, arrays, args, partials.view);
    GatherSumKernelArgs gather = sum_args(operation, plan, args);
    gather.targets = arrays.links()->rank_targets;
    gather.weights = nullptr;
    gather.dtype = partials.view.dtype;
    queue_gather(agreed, gather, shown.num_bytes);
  };
  return ready(std::move(call));
}

// own_bytes: size of the rows that this rank shows.
void CudaDirect::queue_gather(const CudaRank::Agreed& agreed, GatherSumKernelArgs& gather,
                              int64_t own_bytes) {
  gather.signals = rank_.signals();
  rank_.reach(agreed, 0, gather.rows);
  gather.num_sharing = rank_.num_sharing();
  gather.awaits_peers = agreed.has_waiting_room && !agreed.is_queued();
  if (agreed.is_queued()) {
    rank_.await_peers(agreed, gather.operation);
  } else if (!gather.awaits_peers) {
    launch_gather_barrier(gather, own_bytes, rank_.stream());
  }
  launch_gather_sum(gather, rank_.max_sms(), rank_.stream());
}

ReadyCall CudaDirect::ready_combine_backward(const Plan& plan, const GradientTensors& tensors) {
  const TensorView& grad_rows = tensors.grad_rows;
  ExposedMemory y = rank_.show(tensors.y.data, tensors.y.num_bytes(), /*with_contents=*/true);
  ExposedMemory grad = rank_.show(grad_rows.data, grad_rows.num_bytes(), /*with_contents=*/false);
  CudaCall call{.handles = {y.handle, grad.handle}};
  call.queue = [this, &plan, tensors, y = std::move(y),
                grad = std::move(grad)](const CudaRank::Agreed& agreed) {
    const CudaPlan& arrays = device_plan(plan);
    GatherSumBackwardArgs backward{};
    backward.targets = arrays.arrays().targets;
    backward.weights = arrays.arrays().weights;
    backward.T = plan.num_tokens();
    backward.K = arrays.shape().K;
    backward.D = static_cast<int32_t>(config().width);
    backward.dtype = tensors.y.dtype;
    backward.grad_out = static_cast<const std::byte*>(tensors.grad_out.data);
    backward.grad_weights = static_cast<float*>(tensors.grad_weights.data);
    backward.signals = rank_.signals();
    rank_.reach(agreed, 0, backward.y);
    rank_.reach(agreed, 1, backward.grad_rows);
    rank_.zero_pads(arrays, grad.data, tensors.grad_rows.row_bytes());
    rank_.await_peers(agreed, Operation::kCombineBackward);
    launch_gather_sum_backward(backward, rank_.max_sms(), rank_.stream());
    rank_.fetch(grad);
  };
  return ready(std::move(call));
}

ReadyCall CudaDirect::ready_collect_routes(const Plan& plan, const ConstTensorView& rows,
                                           const TensorView& routes) {
  ExposedMemory shown = rank_.show(rows.data, rows.num_bytes(), /*with_contents=*/true);
  CudaCall call{.handles = {shown.handle}};
  call.queue = [this, &plan, routes, shown = std::move(shown)](const CudaRank::Agreed& agreed) {
    GatherRoutesArgs values{};
    values.targets = device_plan(plan).arrays().targets;
    values.num_routes = routes.num_elements();
    values.routes = static_cast<float*>(routes.data);
    values.signals = rank_.signals();
    rank_.reach(agreed, 0, values.rows);
    rank_.await_peers(agreed, Operation::kRouteValues);
    launch_gather_routes(values, rank_.stream());
  };
  return ready(std::move(call));
}

}  // namespace crossdock::cuda
