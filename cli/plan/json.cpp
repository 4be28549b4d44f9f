#include "cli/json.hpp"

#include "cli/plan/report.hpp"

namespace crossdock::cli {
namespace {

Json json_of(const LinkLoad& load) {
  return {{"within_node", load.within_node}, {"between_nodes", load.between_nodes}};
}

Json json_of(const OperationCost& cost) {
  return {{"rows", json_of(cost.rows)},
          {"bytes", json_of(cost.bytes)},
          {"most_bytes", json_of(cost.most_bytes)},
          {"memory_traffic", cost.memory_traffic},
          {"requests", cost.requests},
          {"rounds", cost.rounds},
          {"lower_bound_s", cost.lower_bound_s},
          {"serial_s", cost.serial_s}};
}

Json json_of(const MemoryNeed& need, const Fabric& fabric) {
  return {{"window_bytes", need.window_bytes},
          {"pool_bytes", need.pool_bytes},
          {"plan_bytes", need.plan_bytes},
          {"total_bytes", need.total()},
          {"fits", fits(need, fabric)}};
}

Json json_of(const QueueNeed& need) {
  return {{"entries_per_token", need.entries_per_token},
          {"entries", need.entries},
          {"largest_tokens", need.largest_tokens},
          {"largest_rounded_tokens", need.largest_rounded_tokens},
          {"fits", need.fits}};
}

Json json_of(const StrategyCost& cost, const Fabric& fabric) {
  Json memory = {{"expected", json_of(cost.memory.expected, fabric)},
                 {"worst_case", json_of(cost.memory.worst_case, fabric)}};
  if (cost.memory.with_capacity) {
    memory["with_capacity"] = json_of(*cost.memory.with_capacity, fabric);
  }
  return {{"name", cost.name},
          {"dispatch", json_of(cost.dispatch)},
          {"combine", json_of(cost.combine)},
          {"partial_sums", json_of(cost.partial_sums)},
          {"memory", memory},
          {"max_in_flight", cost.max_in_flight},
          {"step_lower_bound_s", cost.step_lower_bound_s},
          {"step_serial_s", cost.step_serial_s}};
}

Json json_of_job(const PlanHeading& heading, const JobPlan& plan) {
  const JobDescription& job = heading.job;
  Json json = Json::object();
  if (!heading.model.empty()) json["model"] = heading.model;
  json["width"] = job.width;
  json["inner"] = job.inner;
  json["experts"] = job.num_experts;
  json["top_k"] = job.top_k;
  json["dtype"] = name_of(job.dtype);
  json["tokens_per_rank"] = plan.inputs.tokens;
  json["nodes"] = job.nodes;
  json["ranks_per_node"] = job.ranks_per_node;
  json["ranks"] = plan.num_ranks;
  json["group_ranks"] = plan.group_ranks;
  json["group_nodes"] = plan.group_nodes;
  const bool has_sums = job.partial_sums != PartialSums::kNone;
  json["partial_sums"] = has_sums ? Json(name_of(job.partial_sums)) : Json(false);
  json["copies"] = name_of(job.copies);
  json["zipf"] = job.zipf;
  if (job.capacity) {
    json["capacity"] = *job.capacity;
    json["capacity_rows"] = plan.capacity_rows;
  }
  json["expert_weight_bytes"] = plan.expert_weight_bytes;
  return json;
}

Json json_of(const Fabric& fabric) {
  return {{"name", fabric.name},
          {"within_node_rate", fabric.within_node_rate},
          {"between_nodes_rate", fabric.between_nodes_rate},
          {"memory_rate", fabric.memory_rate},
          {"memory_bytes", fabric.memory_bytes},
          {"send_queue_depth", fabric.send_queue_depth}};
}

Json json_of(const RoutingEstimate& routing) {
  return {
      {"ranks_per_token", routing.ranks_per_token}, {"nodes_per_token", routing.nodes_per_token},
      {"rows_per_rank", routing.rows_per_rank},     {"most_rows", routing.most_rows},
      {"dropped_share", routing.dropped_share},     {"most_experts", routing.most_experts}};
}

}  // namespace

std::string plan_json(const PlanHeading& heading, const JobPlan& plan) {
  const Fabric& fabric = heading.job.fabric;
  Json strategies = Json::array();
  for (const StrategyCost& cost : plan.costs.strategies) {
    strategies.push_back(json_of(cost, fabric));
  }
  return json_text({{"job", json_of_job(heading, plan)},
                    {"fabric", json_of(fabric)},
                    {"routing", json_of(plan.costs.routing)},
                    {"strategies", strategies},
                    {"least_dispatch", json_of(plan.costs.least_dispatch)},
                    {"send_queue",
                     {{"depth", fabric.send_queue_depth},
                      {"dispatch_3n_plus_1", json_of(plan.dispatch_queue)},
                      {"combine_2n_plus_1", json_of(plan.combine_queue)},
                      {"max_in_flight", heading.job.mpi.max_in_flight}}},
                    {"strategy", plan.choice.name},
                    {"reason", plan.choice.reason}},
                   3);
}

}  // namespace crossdock::cli
