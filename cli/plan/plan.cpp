#include <iostream>

#include "cli/commands.hpp"
#include "cli/plan/model_config.hpp"
#include "cli/plan/report.hpp"
#include "crossdock/planner.hpp"

namespace crossdock::cli {
namespace {

void set_layer(const PlanArgs& args, PlanHeading& heading) {
  JobDescription& job = heading.job;
  const auto take = [&](const auto& model) {
    heading.model = model.name;
    job.width = model.width;
    job.inner = model.inner;
    job.num_experts = model.num_experts;
    job.top_k = model.top_k;
  };
  if (!args.model.empty() && !args.config.empty()) {
    throw ArgumentError("give --model or --config, not both");
  }
  if (!args.model.empty()) take(find_model(args.model));
  if (!args.config.empty()) take(read_model_config(args.config));
  if (args.width) job.width = *args.width;
  if (args.inner) job.inner = *args.inner;
  if (args.experts) job.num_experts = *args.experts;
  if (args.top_k) job.top_k = *args.top_k;
  if (heading.model.empty() && !(args.width && args.experts && args.top_k)) {
    throw ArgumentError("give --model, --config, or --width, --experts and --top-k");
  }
  job.dtype = parse_dtype(args.dtype);
}

void set_tokens(const PlanArgs& args, JobDescription& job) {
  if (args.tokens && (args.sequence || args.micro_batch)) {
    throw ArgumentError("give --tokens, or --seq and --micro-batch, not both");
  }
  if (!args.tokens && !args.sequence) throw ArgumentError("give --seq, or --tokens");
  job.tokens = args.tokens;
  job.sequence = args.sequence.value_or(0);
  job.micro_batch = args.micro_batch.value_or(1);
}

void set_fabric(const PlanArgs& args, JobDescription& job) {
  job.fabric = find_fabric(args.fabric);
  if (args.within_rate) job.fabric.within_node_rate = *args.within_rate * 1e9;
  if (args.between_rate) job.fabric.between_nodes_rate = *args.between_rate * 1e9;
  if (args.memory) {
    if (!(*args.memory > 0 && *args.memory < 1e9)) {
      throw ArgumentError("--memory must be a positive number of GB");
    }
    job.fabric.memory_bytes = static_cast<int64_t>(*args.memory * 1e9);
  }
  if (args.queue_depth) job.fabric.send_queue_depth = *args.queue_depth;
  if (args.max_in_flight) job.mpi.max_in_flight = *args.max_in_flight;
}

PlanHeading describe(const PlanArgs& args) {
  PlanHeading heading;
  JobDescription& job = heading.job;
  set_layer(args, heading);
  set_tokens(args, job);
  set_fabric(args, job);
  job.nodes = args.nodes;
  job.ranks_per_node = args.ranks_per_node;
  job.tp = args.tp;
  job.cp = args.cp;
  job.pp = args.pp;
  job.ep = args.ep;
  job.alignment = args.alignment;
  job.capacity = args.capacity;
  job.partial_sums = parse_partial_sums(args.partial_sums);
  job.copies = parse_copies(args.copies);
  job.zipf = args.zipf;
  heading.with_queue = args.queue;
  return heading;
}

}  // namespace

int run_plan(const PlanArgs& args) {
  const PlanHeading heading = describe(args);
  const JobPlan plan = plan_job(heading.job);
  if (args.json) {
    std::cout << plan_json(heading, plan) << "\n";
  } else {
    std::cout << plan_text(heading, plan, output_style());
  }
  return 0;
}

}  // namespace crossdock::cli
