#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/tensor_check.hpp"
#include "dispatch/cuda/cuda_direct.hpp"
#include "dispatch/cuda/host_routing.hpp"
#include "dispatch/placement.hpp"

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
  Placement placement = make_placement(rank.config(), data->P);
  data->owner = std::move(placement.owner);
  data->experts_by_owner = std::move(placement.experts_by_owner);
  data->owner_offsets = std::move(placement.owner_offsets);
  return data;
}

int64_t num_block_counts(const CudaPlanInputs& inputs) {
  return int64_t{plan_blocks(inputs.T, inputs.shape.K)} * inputs.shape.E;
}

int64_t scratch_bytes(const CudaPlanInputs& inputs) {
  return (num_block_counts(inputs) + inputs.shape.E) * static_cast<int64_t>(sizeof(int32_t));
}

PlanArgs plan_args(const Routing& routing, const CudaPlan& plan, const Buffer& scratch) {
  const CudaPlanInputs& inputs = plan.inputs();
  auto* counts = reinterpret_cast<int32_t*>(scratch.data());
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

// Drops by weight need a selection per expert, which the host makes.
bool CudaDirect::plans_on_device() const {
  const DispatchConfig& config = rank_.config();
  return (!config.capacity || config.capacity->policy == DropPolicy::kPosition) &&
         config.num_experts <= kMaxExperts;
}

std::shared_ptr<const DevicePlanData> CudaDirect::upload(const Plan& host_plan) {
  const PlanData& data = host_plan.data();
  return std::make_shared<CudaPlan>(rank_.pool(), rank_.plan_inputs(data.T), data);
}

Plan CudaDirect::plan(const DenseRouting& routing, const PlanDenseOnHost& plan) {
  const DeviceGuard guard(rank_.device());
  return plan_on_host(rank_, routing, plan, [&](const Plan& made) { return upload(made); });
}

// Once the ranks have met, a rank only queues work until all have: an allocation could wait for
// kernels that wait for this rank.
Plan CudaDirect::plan(const Routing& routing, const PlanOnHost& plan) {
  const DeviceGuard guard(rank_.device());
  if (!plans_on_device())
    return plan_on_host(rank_, routing, plan, [&](const Plan& made) { return upload(made); });
  const std::optional<int64_t>& max_rows = rank_.config().max_rows;
  std::shared_ptr<CudaPlan> arrays;
  Buffer scratch;
  std::optional<Error> refusal = refusal_of([&] {
    rank_.raise_faults();
    check_routing(rank_, routing);
    const int64_t T = routing.expert_ids.shape[0];
    arrays = std::make_shared<CudaPlan>(rank_.pool(), rank_.plan_inputs(T));
    scratch = rank_.pool().take(scratch_bytes(arrays->inputs()), rank_.stream());
    if (!max_rows) return;
    arrays->set_capacity_rows(*max_rows);
    if (wants_landing_) {
      const int64_t row_bytes = rank_.config().width * size_of(row_dtype_);
      arrays->set_landing(rank_.pool().take(*max_rows * row_bytes, rank_.stream()));
    }
  });
  const CudaRank::Met met =
      rank_.meet({.operation = "plan",
                  .plan = nullptr,
                  .call_text = concat(rank_.context().config_text, ";weights=fp32;device=cuda"),
                  .handles = {},
                  .refusal = std::move(refusal)});
  const EventRecorder::Scope scope(rank_.group().recorder(), "plan", met.sequence);
  run_agreed(rank_.group(), [&] {
    PlanArgs args = plan_args(routing, *arrays, scratch);
    args.signals = rank_.signals();
    launch_plan(args, rank_.stream());
    if (!max_rows) arrays->set_capacity_rows(arrays->num_rows());
  });
  if (!max_rows) rank_.raise_faults();  // the same on all ranks
  return {host_part(rank_, arrays->inputs().T, met.sequence), nullptr, std::move(arrays)};
}

}  // namespace crossdock::cuda
