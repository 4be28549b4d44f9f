#include "dispatch/strategies/direct/plan_inputs.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/extend/strategy.hpp"
#include "dispatch/call.hpp"
#include "dispatch/cuda/gpu_call.hpp"
#include "dispatch/cuda/kernels/link_rows.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {
namespace {

// Checks the tensors that both kinds of routing have. `routes`: the ids or the map, already
// checked.
void check_common(const CudaRank& rank, const ConstTensorView& routes,
                  const ConstTensorView& weights, const ConstTensorView& mask) {
  const DispatchConfig& config = rank.config();
  const int64_t T = routes.shape[0];
  CROSSDOCK_CHECK(weights.shape == routes.shape && is_summable(weights.dtype), "weights must be ",
                  routes.shape.to_string(), " fp32, fp64, bf16 or fp16, got ", describe(weights));
  check_tensor_on(rank.where(), "weights", weights, routes.shape);
  if (mask.given()) {
    check_tensor_on(rank.where(), "mask", mask, {T});
    CROSSDOCK_CHECK(mask.dtype == DType::kBool, "mask must be [", T, "] bool, got ",
                    describe(mask));
  }
  if (config.capacity && config.capacity->pad_to_capacity) {
    CROSSDOCK_CHECK(T <= config.capacity->max_tokens, "T is ", T, ", must be at most max_tokens (",
                    config.capacity->max_tokens, ") with pad_to_capacity");
  }
  CROSSDOCK_CHECK(config.max_rows || !is_capturing(rank.stream()),
                  "a plan that is captured in a graph needs max_rows in the configuration: without "
                  "it the host must wait for the number of rows");
}

void check_map(const CudaRank& rank, const DenseRouting& routing) {
  const int64_t E = rank.config().num_experts;
  const ConstTensorView& map = routing.map;
  CROSSDOCK_CHECK(map.shape.rank() == 2 && map.shape[1] == E && map.dtype == DType::kBool,
                  "map must be [T, ", E, "] bool, got ", describe(map));
  check_tensor_on(rank.where(), "map", map, map.shape);
  check_common(rank, map, routing.weights, routing.mask);
}

const bool* mask_of(const ConstTensorView& mask) {
  return static_cast<const bool*>(mask.data);
}

// Waits for the GPU.
int64_t most_bits(CudaRank& rank, const DenseRouting& routing) {
  rank.await_stream();  // the copy must not wait for kernels that wait for peers
  const OwnedTensor most = rank.take(DType::kI32, {1});
  auto* there = static_cast<int32_t*>(most.view.data);
  launch_most_bits(static_cast<const uint8_t*>(routing.map.data), mask_of(routing.mask),
                   routing.map.shape[0], static_cast<int32_t>(rank.config().num_experts), there,
                   rank.stream());
  int32_t bits = 0;
  CROSSDOCK_CUDA(
      cudaMemcpyAsync(&bits, there, sizeof(bits), cudaMemcpyDeviceToHost, rank.stream()));
  rank.await_stream();
  return bits;
}

}  // namespace

ReadyRouting ready_routing(CudaRank& rank, const Routing& routing) {
  const ConstTensorView& ids = routing.expert_ids;
  const int64_t K = rank.config().top_k;
  CROSSDOCK_CHECK(ids.shape.rank() == 2 && ids.shape[1] == K &&
                      (ids.dtype == DType::kI32 || ids.dtype == DType::kI64),
                  "expert_ids must be [T, ", K, "] int32 or int64, got ", describe(ids));
  check_tensor_on(rank.where(), "expert_ids", ids, ids.shape);
  check_common(rank, ids, routing.weights, routing.mask);
  ReadyRouting ready{.slots = {.expert_ids = ids.data,
                               .ids_are_64_bit = ids.dtype == DType::kI64,
                               .ids_are_distinct = false,
                               .weights = static_cast<const float*>(routing.weights.data),
                               .mask = mask_of(routing.mask),
                               .T = ids.shape[0]}};
  if (routing.weights.dtype == DType::kF32) return ready;
  const OwnedTensor rounded = rank.take(DType::kF32, ids.shape);
  ready.slots.weights = static_cast<const float*>(rounded.view.data);
  ready.queue = [&rank, weights = routing.weights, rounded] {
    launch_round_weights(weights.data, weights.dtype, weights.num_elements(),
                         static_cast<float*>(rounded.view.data), rank.stream());
  };
  return ready;
}

ReadyRouting ready_routing(CudaRank& rank, const DenseRouting& routing, int64_t K) {
  check_map(rank, routing);
  const int64_t T = routing.map.shape[0];
  const OwnedTensor ids = rank.take(DType::kI32, {T, K});
  const OwnedTensor weights = rank.take(DType::kF32, {T, K});
  ReadyRouting ready{.slots = {.expert_ids = ids.view.data,
                               .ids_are_64_bit = false,
                               .ids_are_distinct = true,
                               .weights = static_cast<const float*>(weights.view.data),
                               .mask = nullptr,  // masked tokens have no ids
                               .T = T}};
  ready.queue = [&rank, routing, ids, weights] {
    launch_map_slots({.map = static_cast<const uint8_t*>(routing.map.data),
                      .weights = routing.weights.data,
                      .weight_dtype = routing.weights.dtype,
                      .mask = mask_of(routing.mask),
                      .T = routing.map.shape[0],
                      .E = static_cast<int32_t>(routing.map.shape[1]),
                      .K = static_cast<int32_t>(ids.view.shape[1]),
                      .expert_ids = static_cast<int32_t*>(ids.view.data),
                      .slot_weights = static_cast<float*>(weights.view.data),
                      .bad_route = &rank.signals().state->bad_route},
                     rank.stream());
  };
  return ready;
}

int64_t agree_num_slots(CudaRank& rank, const DenseRouting& routing) {
  const DispatchConfig& config = rank.config();
  if (config.max_routes_per_token > 0) return config.max_routes_per_token;
  if (config.top_k == config.num_experts) return config.top_k;
  int64_t slots = config.top_k;
  GpuCall call(rank, {.operation = "plan",
                      .plan = nullptr,
                      .text = concat(rank.context().config_text, ";routing=map;device=cuda")});
  call.prepare([&] {
    CROSSDOCK_CHECK(!is_capturing(rank.stream()),
                    "a plan of a dense map that is captured in a graph needs max_routes_per_token "
                    "in the configuration: without it the host must wait for the number of bits");
    check_map(rank, routing);
    slots = std::max(slots, most_bits(rank, routing));
  });
  return call.agree({.needs_barrier = false, .num_slots = slots, .must_meet = true}).num_slots;
}

namespace {

// The number of this rank's rows, on the device.
const int64_t* rows_in_use(const CudaPlan& plan) {
  return plan.arrays().rows_per_rank + plan.inputs().rank;
}

}  // namespace

ReadyLinks ready_links(GpuCall& call, const CudaPlan& plan) {
  ReadyLinks links;
  links.memory = plan.take_links(call.rank().pool(), plan.capacity_rows());
  const int64_t num_bytes = links.memory->num_rows * static_cast<int64_t>(sizeof(RowLink));
  links.shown = call.show(links.memory->rows, num_bytes, /*with_contents=*/false);
  return links;
}

void queue_links(const GpuCall& call, const CudaPlan& plan, const ReadyLinks& links) {
  plan.set_links(links.memory);
  LinkRowsArgs args{};
  args.targets = plan.arrays().targets;
  args.weights = plan.arrays().weights;
  args.T = plan.inputs().T;
  args.K = plan.shape().K;
  args.links = *links.memory;
  args.signals = call.signals();
  call.reach(0, args.rows);
  call.zero_pads(plan, reinterpret_cast<std::byte*>(args.links.rows), sizeof(RowLink));
  launch_link_rows(args, call.stream());
}

void queue_fan_out(const GpuCall& call, const CudaPlan& plan, std::span<const FanOutPart> parts,
                   const TensorView& row_weights) {
  FanOutArgs args{};
  args.links = *plan.links();
  args.rows_in_use = rows_in_use(plan);
  args.num_parts = static_cast<int32_t>(parts.size());
  std::ranges::copy(parts, args.parts);
  args.row_weights = static_cast<float*>(row_weights.data);
  args.signals = call.signals().state;
  launch_fan_out(args, call.max_sms(), call.stream());
}

void queue_partial_sums(const GpuCall& call, const CudaPlan& plan, const GatherSumArgs& args,
                        const TensorView& partials) {
  launch_partial_sums({.links = *plan.links(),
                       .rows_in_use = rows_in_use(plan),
                       .is_weighted = args.weights.given(),
                       .D = static_cast<int32_t>(args.rows.shape[1]),
                       .dtype = args.rows.dtype,
                       .partial_dtype = partials.dtype,
                       .rows = static_cast<const std::byte*>(args.rows.data),
                       .partials = static_cast<std::byte*>(partials.data),
                       .signals = call.signals().state},
                      call.max_sms(), call.stream());
}

}  // namespace crossdock::cuda
