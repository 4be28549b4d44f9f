#include "planner/job_mesh.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "cost/cost_model.hpp"

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

}  // namespace crossdock
