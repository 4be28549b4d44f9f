#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/strategies/direct/cuda_direct.hpp"
#include "plan/cuda/plan_limits.hpp"

namespace crossdock::cuda {
namespace {

void check_routing(const CudaRank& rank, const Routing& routing) {
  const DispatchConfig& config = rank.config();
  const ConstTensorView& ids = routing.expert_ids;
  CROSSDOCK_CHECK(ids.shape.rank() == 2 && ids.shape[1] == config.top_k &&
                      (ids.dtype == DType::kI32 || ids.dtype == DType::kI64),
                  "expert_ids must be [T, ", config.top_k, "] int32 or int64, got ", describe(ids));
  rank.check_tensor("expert_ids", ids, ids.shape);
  rank.check_tensor("weights", routing.weights, ids.shape);
  CROSSDOCK_CHECK(routing.weights.dtype == DType::kF32, "weights on a GPU must be fp32, got ",
                  name_of(routing.weights.dtype));
  const int64_t T = ids.shape[0];
  if (routing.mask.given()) {
    rank.check_tensor("mask", routing.mask, {T});
    CROSSDOCK_CHECK(routing.mask.dtype == DType::kBool, "mask must be [", T, "] bool, got ",
                    describe(routing.mask));
  }
  if (config.capacity && config.capacity->pad_to_capacity) {
    CROSSDOCK_CHECK(T <= config.capacity->max_tokens, "T is ", T, ", must be at most max_tokens (",
                    config.capacity->max_tokens, ") with pad_to_capacity");
  }
  CROSSDOCK_CHECK(config.max_rows || !is_capturing(rank.stream()),
                  "a plan that is captured in a graph needs max_rows in the configuration: without "
                  "it the host must wait for the number of rows");
}

std::shared_ptr<PlanData> host_part(const CudaRank& rank, int64_t T, uint64_t id) {
  auto data = std::make_shared<PlanData>();
  data->T = T;
  data->K = rank.config().top_k;
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

int64_t num_block_counts(const CudaPlanInputs& inputs) {
  return int64_t{plan_blocks(inputs.T, inputs.shape.K)} * inputs.shape.E;
}

PlanArgs plan_args(const Routing& routing, const CudaPlan& plan, const TensorView& scratch) {
  const CudaPlanInputs& inputs = plan.inputs();
  auto* counts = static_cast<int32_t*>(scratch.data);
  return {.routing = {.expert_ids = routing.expert_ids.data,
                      .ids_are_64_bit = routing.expert_ids.dtype == DType::kI64,
                      .weights = static_cast<const float*>(routing.weights.data),
                      .mask = static_cast<const bool*>(routing.mask.data),
                      .T = inputs.T},
          .shape = inputs.shape,
          .plan = plan.arrays(),
          .block_counts = counts,
          .route_base = counts + num_block_counts(inputs),
          .signals = {}};
}

}  // namespace

// Drops by weight need a selection per expert, which the host makes; so do more experts than the
// GPU has shared memory for.
bool CudaDirect::plans_on_device() const {
  const DispatchConfig& config = rank_.config();
  return (!config.capacity || config.capacity->policy == DropPolicy::kPosition) &&
         fits_device_plan(config.num_experts, shared_memory_per_block(rank_.device()));
}

std::shared_ptr<const DevicePlanData> CudaDirect::upload(const Plan& host_plan) {
  const PlanData& data = host_plan.data();
  return std::make_shared<CudaPlan>(rank_.pool(), rank_.plan_inputs(data.T), data);
}

Plan CudaDirect::plan(const Routing& routing, const PlanOnHost& plan_on_host) {
  if (!plans_on_device()) return CudaPath::plan(routing, plan_on_host);
  const std::optional<int64_t>& max_rows = rank_.config().max_rows;
  std::shared_ptr<CudaPlan> arrays;
  std::string text = concat(rank_.context().config_text, ";weights=fp32;device=cuda");
  const Call call{.operation = "plan", .plan = nullptr, .text = std::move(text)};
  const uint64_t id = run(call, [&] {
    check_routing(rank_, routing);
    arrays =
        std::make_shared<CudaPlan>(rank_.pool(), rank_.plan_inputs(routing.expert_ids.shape[0]));
    const OwnedTensor scratch =
        rank_.take(DType::kI32, {num_block_counts(arrays->inputs()) + rank_.config().num_experts});
    if (max_rows) arrays->set_capacity_rows(*max_rows);
    if (max_rows && wants_landing_) {
      const int64_t row_bytes = rank_.config().width * size_of(row_dtype_);
      arrays->set_landing(rank_.pool().take(*max_rows * row_bytes, rank_.stream()));
    }
    ReadyCall ready;
    ready.queue = [&, scratch](const CudaRank::Met& /*met*/) {
      PlanArgs args = plan_args(routing, *arrays, scratch.view);
      args.signals = rank_.signals();
      launch_plan(args, rank_.stream());
      if (!max_rows) arrays->set_capacity_rows(arrays->num_rows());
    };
    return ready;
  });
  if (!max_rows) rank_.raise_faults();  // the same on all ranks
  const int64_t T = arrays->inputs().T;
  return {host_part(rank_, T, id), nullptr, std::move(arrays)};
}

}  // namespace crossdock::cuda
