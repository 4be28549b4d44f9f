#include <iterator>
#include <vector>

#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"

namespace crossdock::capi {
namespace {

JobDescription to_job(const crossdock_job& given) {
  const ModelPreset model = given.model != nullptr ? find_model(given.model) : ModelPreset{};
  JobDescription job;
  job.width = or_default(given.width, model.width);
  job.inner = or_default(given.inner, model.inner);
  job.num_experts = or_default(given.num_experts, model.num_experts);
  job.top_k = or_default(given.top_k, model.top_k);
  if (given.dtype != 0) job.dtype = to_dtype("crossdock_job", given.dtype);
  job.sequence = given.sequence;
  job.micro_batch = or_default<int64_t>(given.micro_batch, 1);
  if (given.tokens != 0) job.tokens = given.tokens;
  job.nodes = or_default<int64_t>(given.nodes, 1);
  job.ranks_per_node = or_default<int64_t>(given.ranks_per_node, 1);
  job.tp = or_default<int64_t>(given.tp, 1);
  job.cp = or_default<int64_t>(given.cp, 1);
  job.pp = or_default<int64_t>(given.pp, 1);
  if (given.ep != 0) job.ep = given.ep;
  job.alignment = or_default<int64_t>(given.alignment, 1);
  if (given.capacity_factor != 0) job.capacity = given.capacity_factor;
  job.partial_sums = to_partial_sums(given.partial_sums);
  job.zipf = given.zipf;
  if (given.fabric != nullptr) job.fabric = find_fabric(given.fabric);
  return job;
}

crossdock_operation_cost from_cost(const OperationCost& cost) {
  return {.bytes_within_node = cost.bytes.within_node,
          .bytes_between_nodes = cost.bytes.between_nodes,
          .lower_bound_s = cost.lower_bound_s,
          .serial_s = cost.serial_s};
}

}  // namespace
}  // namespace crossdock::capi

using namespace crossdock;
using capi::guarded;
using capi::handle;
using capi::pointee;

crossdock_status crossdock_job_plan_create(const crossdock_job* job, crossdock_job_plan** plan) {
  return guarded([&] {
    crossdock_job_plan*& made = pointee("plan", plan);
    const auto given = capi::read_struct("crossdock_job", job);
    made = new crossdock_job_plan(plan_job(capi::to_job(given)));
  });
}

void crossdock_job_plan_destroy(crossdock_job_plan* plan) {
  capi::destroy(plan);
}

crossdock_status crossdock_job_plan_describe(const crossdock_job_plan* plan,
                                             crossdock_job_summary* summary) {
  return guarded([&] {
    const JobPlan& made = handle("plan", plan).plan;
    const RoutingEstimate& routing = made.costs.routing;
    crossdock_job_summary value = {};
    value.strategy = made.choice.name.c_str();
    value.reason = made.choice.reason.c_str();
    value.num_strategies = std::ssize(made.costs.strategies);
    value.tokens = made.inputs.tokens;
    value.num_ranks = made.num_ranks;
    value.group_ranks = made.group_ranks;
    value.group_nodes = made.group_nodes;
    value.capacity_rows = made.capacity_rows;
    value.expert_weight_bytes = made.expert_weight_bytes;
    value.ranks_per_token = routing.ranks_per_token;
    value.nodes_per_token = routing.nodes_per_token;
    value.rows_per_rank = routing.rows_per_rank;
    value.most_rows = routing.most_rows;
    value.dropped_share = routing.dropped_share;
    capi::write_struct("crossdock_job_summary", summary, value);
  });
}

crossdock_status crossdock_job_plan_strategy(const crossdock_job_plan* plan, int64_t index,
                                             crossdock_strategy_cost* cost) {
  return guarded([&] {
    const JobPlan& made = handle("plan", plan).plan;
    const std::vector<StrategyCost>& all = made.costs.strategies;
    CROSSDOCK_CHECK(index >= 0 && index < std::ssize(all), "index must be in [0, ", all.size(),
                    "), got ", index);
    const StrategyCost& strategy = all[static_cast<size_t>(index)];
    const bool is_exact = made.inputs.config.partial_sums == PartialSums::kNone;
    crossdock_strategy_cost value = {};
    value.name = strategy.name.c_str();
    value.dispatch = capi::from_cost(strategy.dispatch);
    value.combine = capi::from_cost(is_exact ? strategy.combine : strategy.partial_sums);
    value.expected_bytes = strategy.memory.expected.total();
    value.worst_bytes = strategy.memory.with_capacity.value_or(strategy.memory.worst_case).total();
    value.step_lower_bound_s = strategy.step_lower_bound_s;
    value.step_serial_s = strategy.step_serial_s;
    capi::write_struct("crossdock_strategy_cost", cost, value);
  });
}
