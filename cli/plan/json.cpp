#include "cli/json_writer.hpp"
#include "cli/plan/report.hpp"

namespace crossdock::cli {
namespace {

void write(JsonWriter& writer, std::string_view name, const LinkLoad& load) {
  writer.key(name);
  writer.begin_object();
  writer.field("within_node", load.within_node);
  writer.field("between_nodes", load.between_nodes);
  writer.end_object();
}

void write(JsonWriter& writer, std::string_view name, const OperationCost& cost) {
  writer.key(name);
  writer.begin_object();
  write(writer, "rows", cost.rows);
  write(writer, "bytes", cost.bytes);
  write(writer, "most_bytes", cost.most_bytes);
  writer.field("memory_traffic", cost.memory_traffic);
  writer.field("requests", cost.requests);
  writer.field("rounds", cost.rounds);
  writer.field("lower_bound_s", cost.lower_bound_s);
  writer.field("serial_s", cost.serial_s);
  writer.end_object();
}

void write(JsonWriter& writer, std::string_view name, const MemoryNeed& need,
           const Fabric& fabric) {
  writer.key(name);
  writer.begin_object();
  writer.field("window_bytes", need.window_bytes);
  writer.field("pool_bytes", need.pool_bytes);
  writer.field("plan_bytes", need.plan_bytes);
  writer.field("total_bytes", need.total());
  writer.field("fits", fits(need, fabric));
  writer.end_object();
}

void write(JsonWriter& writer, std::string_view name, const QueueNeed& need) {
  writer.key(name);
  writer.begin_object();
  writer.field("entries_per_token", need.entries_per_token);
  writer.field("entries", need.entries);
  writer.field("largest_tokens", need.largest_tokens);
  writer.field("largest_rounded_tokens", need.largest_rounded_tokens);
  writer.field("fits", need.fits);
  writer.end_object();
}

void write(JsonWriter& writer, const StrategyCost& cost, const Fabric& fabric) {
  writer.begin_object();
  writer.field("name", cost.name);
  write(writer, "dispatch", cost.dispatch);
  write(writer, "combine", cost.combine);
  write(writer, "partial_sums", cost.partial_sums);
  writer.key("memory");
  writer.begin_object();
  write(writer, "expected", cost.memory.expected, fabric);
  write(writer, "worst_case", cost.memory.worst_case, fabric);
  if (cost.memory.with_capacity) {
    write(writer, "with_capacity", *cost.memory.with_capacity, fabric);
  }
  writer.end_object();
  writer.field("max_in_flight", cost.max_in_flight);
  writer.field("step_lower_bound_s", cost.step_lower_bound_s);
  writer.field("step_serial_s", cost.step_serial_s);
  writer.end_object();
}

void write_job(JsonWriter& writer, const PlanHeading& heading, const JobPlan& plan) {
  const JobDescription& job = heading.job;
  writer.key("job");
  writer.begin_object();
  if (!heading.model.empty()) writer.field("model", heading.model);
  writer.field("width", job.width);
  writer.field("inner", job.inner);
  writer.field("experts", job.num_experts);
  writer.field("top_k", job.top_k);
  writer.field("dtype", name_of(job.dtype));
  writer.field("tokens_per_rank", plan.inputs.tokens);
  writer.field("nodes", job.nodes);
  writer.field("ranks_per_node", job.ranks_per_node);
  writer.field("ranks", plan.num_ranks);
  writer.field("group_ranks", plan.group_ranks);
  writer.field("group_nodes", plan.group_nodes);
  if (job.partial_sums == PartialSums::kNone) {
    writer.field("partial_sums", false);
  } else {
    writer.field("partial_sums", name_of(job.partial_sums));
  }
  writer.field("copies", name_of(job.copies));
  writer.field("zipf", job.zipf);
  if (job.capacity) {
    writer.field("capacity", *job.capacity);
    writer.field("capacity_rows", plan.capacity_rows);
  }
  writer.field("expert_weight_bytes", plan.expert_weight_bytes);
  writer.end_object();
}

void write_fabric(JsonWriter& writer, const Fabric& fabric) {
  writer.key("fabric");
  writer.begin_object();
  writer.field("name", fabric.name);
  writer.field("within_node_rate", fabric.within_node_rate);
  writer.field("between_nodes_rate", fabric.between_nodes_rate);
  writer.field("memory_rate", fabric.memory_rate);
  writer.field("memory_bytes", fabric.memory_bytes);
  writer.field("send_queue_depth", fabric.send_queue_depth);
  writer.end_object();
}

void write_routing(JsonWriter& writer, const RoutingEstimate& routing) {
  writer.key("routing");
  writer.begin_object();
  writer.field("ranks_per_token", routing.ranks_per_token);
  writer.field("nodes_per_token", routing.nodes_per_token);
  writer.field("rows_per_rank", routing.rows_per_rank);
  writer.field("most_rows", routing.most_rows);
  writer.field("dropped_share", routing.dropped_share);
  writer.field("most_experts", routing.most_experts);
  writer.end_object();
}

}  // namespace

std::string plan_json(const PlanHeading& heading, const JobPlan& plan) {
  JsonWriter writer(3);
  writer.begin_object();
  write_job(writer, heading, plan);
  write_fabric(writer, heading.job.fabric);
  write_routing(writer, plan.costs.routing);
  writer.key("strategies");
  writer.begin_array();
  for (const StrategyCost& cost : plan.costs.strategies) {
    write(writer, cost, heading.job.fabric);
  }
  writer.end_array();
  write(writer, "least_dispatch", plan.costs.least_dispatch);
  writer.key("send_queue");
  writer.begin_object();
  writer.field("depth", heading.job.fabric.send_queue_depth);
  write(writer, "dispatch_3n_plus_1", plan.dispatch_queue);
  write(writer, "combine_2n_plus_1", plan.combine_queue);
  writer.field("max_in_flight", int64_t{heading.job.mpi.max_in_flight});
  writer.end_object();
  writer.field("strategy", plan.choice.name);
  writer.field("reason", plan.choice.reason);
  writer.end_object();
  return writer.text();
}

}  // namespace crossdock::cli
