#include "crossdock/planner.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "core/text.hpp"
#include "cost/cost_model.hpp"
#include "plan/local_routes.hpp"
#include "planner/job_mesh.hpp"

namespace crossdock {
namespace {

void check_positive(const char* name, int64_t value) {
  CROSSDOCK_CHECK(value >= 1, name, " must be at least 1, got ", value);
}

}  // namespace

MeshLayout make_mesh(const JobDescription& job) {
  check_positive("nodes", job.nodes);
  check_positive("ranks_per_node", job.ranks_per_node);
  check_positive("tp", job.tp);
  check_positive("cp", job.cp);
  check_positive("pp", job.pp);
  CROSSDOCK_CHECK(job.nodes <= kMaxMeshRanks && job.ranks_per_node <= kMaxMeshRanks &&
                      job.nodes * job.ranks_per_node <= kMaxMeshRanks,
                  "nodes (", job.nodes, ") times ranks_per_node (", job.ranks_per_node,
                  ") must be at most ", kMaxMeshRanks, "; with ", job.ranks_per_node,
                  " ranks per node the largest number of nodes is ",
                  kMaxMeshRanks / job.ranks_per_node);
  MeshLayout layout({.world = job.nodes * job.ranks_per_node,
                     .tp = job.tp,
                     .cp = job.cp,
                     .pp = job.pp,
                     .ep = std::max<int64_t>(0, job.ep.value_or(0))});
  if (job.ep) check_positive("ep", *job.ep);
  return layout;
}

void check_tokens(const JobDescription& job) {
  if (job.tokens) {
    CROSSDOCK_CHECK(*job.tokens >= 0 && *job.tokens <= kMaxTokens, "tokens must be from 0 to ",
                    kMaxTokens, ", got ", *job.tokens);
    return;
  }
  check_positive("sequence", job.sequence);
  check_positive("micro_batch", job.micro_batch);
  CROSSDOCK_CHECK(job.sequence <= kMaxTokens, "sequence must be at most ", kMaxTokens, ", got ",
                  job.sequence);
  CROSSDOCK_CHECK(job.micro_batch <= kMaxTokens / job.sequence, "sequence (", job.sequence,
                  ") times micro_batch (", job.micro_batch, ") must be at most ", kMaxTokens,
                  " tokens; with this sequence the largest micro_batch is ",
                  kMaxTokens / job.sequence);
}

int64_t tokens_of_rank(const JobDescription& job) {
  if (job.tokens) return *job.tokens;
  const int64_t shards = job.tp * job.cp;
  return (job.sequence + shards - 1) / shards * job.micro_batch;
}

Topology widest_row_group(const MeshLayout& layout, int64_t ranks_per_node) {
  const auto node_of = [&](int rank) { return static_cast<int>(rank / ranks_per_node); };
  std::vector<int> widest;
  Topology topology;
  for (std::vector<int>& group : layout.groups(MeshAxis::kEtpEp)) {
    const int num_nodes = node_of(group.back()) - node_of(group.front()) + 1;
    if (num_nodes <= topology.num_nodes) continue;
    topology.num_nodes = num_nodes;
    widest = std::move(group);
  }
  for (const int rank : widest) {
    topology.node_of_rank.push_back(node_of(rank) - node_of(widest.front()));
  }
  return topology;
}

const Fabric& find_fabric(std::string_view name) {
  return kFabricPresets[index_of_name("fabric", name, kFabricPresets, &Fabric::name)];
}

const ModelPreset& find_model(std::string_view name) {
  return kModelPresets[index_of_name("model", name, kModelPresets, &ModelPreset::name)];
}

namespace {

// Libraries whose queue grows with the token count round it to a multiple of this.
constexpr int64_t kRoundedTokens = 64;

// A larger capacity factor is assumed to be a mistake.
constexpr double kMaxCapacityFactor = 1 << 20;

void check_layer(const JobDescription& job) {
  CROSSDOCK_CHECK(job.width >= 1 && job.width <= kMaxWidth, "width must be from 1 to ", kMaxWidth,
                  ", got ", job.width);
  CROSSDOCK_CHECK(job.inner >= 0 && job.inner <= kMaxWidth, "inner must be from 0 to ", kMaxWidth,
                  ", got ", job.inner);
  CROSSDOCK_CHECK(!job.capacity || *job.capacity <= kMaxCapacityFactor,
                  "the capacity factor must be at most ", kMaxCapacityFactor, ", got ",
                  job.capacity.value_or(0));
}

// Three matrices per expert.
int64_t weight_bytes(const JobDescription& job, int64_t num_experts) {
  const int64_t row_bytes = 3 * job.width * size_of(job.dtype);
  const int64_t largest = std::numeric_limits<int64_t>::max() / num_experts / row_bytes;
  CROSSDOCK_CHECK(
      job.inner <= largest, "inner (", job.inner, ") with width ", job.width, " and ", num_experts,
      " experts per rank: the expert weights would exceed 2^63 bytes; the largest inner is ",
      largest);
  return num_experts * row_bytes * job.inner;
}

void check_fabric(const JobDescription& job) {
  const Fabric& fabric = job.fabric;
  CROSSDOCK_CHECK(fabric.send_queue_depth >= 2, "the send-queue depth must be at least 2, got ",
                  fabric.send_queue_depth);
  CROSSDOCK_CHECK(job.mpi.max_in_flight <= fabric.send_queue_depth, "max_in_flight is ",
                  job.mpi.max_in_flight, ", more than the send queue of ", fabric.name, " holds (",
                  fabric.send_queue_depth, "); the largest max_in_flight is ",
                  fabric.send_queue_depth);
}

CostInputs cost_inputs(const JobDescription& job, const MeshLayout& mesh) {
  CostInputs inputs{.config = {.num_experts = job.num_experts,
                               .top_k = job.top_k,
                               .width = job.width,
                               .alignment = job.alignment,
                               .capacity = {},
                               .placement = {},
                               .partial_sums = job.partial_sums,
                               .copies = job.copies},
                    .topology = widest_row_group(mesh, job.ranks_per_node),
                    .tokens = tokens_of_rank(job),
                    .dtype = job.dtype,
                    .zipf = job.zipf,
                    .fabric = job.fabric,
                    .mpi = job.mpi};
  if (job.capacity) inputs.config.capacity = Capacity{.factor = *job.capacity};
  return inputs;
}

QueueNeed queue_need(int64_t entries_per_token, int64_t tokens, int64_t depth) {
  QueueNeed need{.entries_per_token = entries_per_token,
                 .entries = entries_per_token * tokens + 1,
                 .largest_tokens = (depth - 1) / entries_per_token};
  need.largest_rounded_tokens = need.largest_tokens / kRoundedTokens * kRoundedTokens;
  need.fits = need.entries <= depth;
  return need;
}

double least_memory(const std::vector<StrategyCost>& costs) {
  double least = std::numeric_limits<double>::infinity();
  for (const StrategyCost& cost : costs) least = std::min(least, cost.memory.expected.total());
  return least;
}

void check_memory(const JobPlan& plan, const StrategyList& candidates) {
  const auto limit = static_cast<double>(plan.inputs.fabric.memory_bytes);
  const double needed = least_memory(plan.costs.strategies);
  if (limit == 0 || needed <= limit) return;
  throw Error(ErrorCode::kCapacity,
              concat("buffers for ", plan.inputs.tokens, " tokens per rank need ",
                     std::ceil(needed / 1e7) / 100, " GB with any strategy, more than the ",
                     limit / 1e9, " GB of a rank of ", plan.inputs.fabric.name,
                     "; the largest number of tokens per rank is ",
                     largest_fitting_tokens(plan.inputs, candidates)));
}

}  // namespace

JobPlan plan_job(const JobDescription& job, const StrategyList& candidates) {
  const MeshLayout mesh = make_mesh(job);
  check_tokens(job);
  check_fabric(job);
  check_layer(job);
  JobPlan plan;
  plan.inputs = cost_inputs(job, mesh);
  plan.num_ranks = mesh.num_ranks();
  plan.group_ranks = mesh.group_size(MeshAxis::kEtpEp);
  plan.group_nodes = plan.inputs.topology.num_nodes;
  plan.costs = estimate_costs(plan.inputs, candidates);
  if (job.capacity) plan.capacity_rows = capacity_rows(plan.inputs.config, plan.inputs.tokens);
  check_memory(plan, candidates);
  plan.expert_weight_bytes = weight_bytes(job, plan.costs.routing.most_experts);
  plan.dispatch_queue = queue_need(3, plan.inputs.tokens, job.fabric.send_queue_depth);
  plan.combine_queue = queue_need(2, plan.inputs.tokens, job.fabric.send_queue_depth);
  plan.choice = choose_strategy(plan.inputs, plan.costs.strategies);
  return plan;
}

}  // namespace crossdock
