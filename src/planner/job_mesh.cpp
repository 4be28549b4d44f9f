#include "planner/job_mesh.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "cost/cost_check.hpp"

namespace crossdock {
namespace {

constexpr int64_t kMaxRanks = 65536;

// The largest value up to `wanted` that divides `ranks`.
int64_t largest_divisor(int64_t ranks, int64_t wanted) {
  int64_t divisor = std::min(wanted, ranks);
  while (ranks % divisor != 0) --divisor;
  return divisor;
}

void check_positive(const char* name, int64_t value) {
  CROSSDOCK_CHECK(value >= 1, name, " must be at least 1, got ", value);
}

}  // namespace

void check_mesh(const JobDescription& job) {
  check_positive("nodes", job.nodes);
  check_positive("ranks_per_node", job.ranks_per_node);
  check_positive("tp", job.tp);
  check_positive("cp", job.cp);
  check_positive("pp", job.pp);
  CROSSDOCK_CHECK(job.nodes <= kMaxRanks && job.ranks_per_node <= kMaxRanks &&
                      job.nodes * job.ranks_per_node <= kMaxRanks,
                  "nodes (", job.nodes, ") times ranks_per_node (", job.ranks_per_node,
                  ") must be at most ", kMaxRanks, "; with ", job.ranks_per_node,
                  " ranks per node the largest number of nodes is ",
                  kMaxRanks / job.ranks_per_node);
  const int64_t ranks = job.nodes * job.ranks_per_node;
  CROSSDOCK_CHECK(ranks % job.pp == 0, "pp (", job.pp, ") must divide the ", ranks,
                  " ranks; the largest pp below that does is ", largest_divisor(ranks, job.pp));
  const int64_t stage = ranks / job.pp;
  CROSSDOCK_CHECK(stage % job.tp == 0 && (stage / job.tp) % job.cp == 0, "tp (", job.tp,
                  ") times cp (", job.cp, ") must divide the ", stage,
                  " ranks of a pipeline stage; with tp ", largest_divisor(stage, job.tp),
                  " the largest cp is ",
                  largest_divisor(stage / largest_divisor(stage, job.tp), job.cp));
  if (job.ep) {
    check_positive("ep", *job.ep);
    CROSSDOCK_CHECK(stage % *job.ep == 0, "ep (", *job.ep, ") must divide the ", stage,
                    " ranks of a pipeline stage; the largest ep below that does is ",
                    largest_divisor(stage, *job.ep));
  }
  if (job.tokens) {
    CROSSDOCK_CHECK(*job.tokens >= 0 && *job.tokens <= kMaxTokens, "tokens must be from 0 to ",
                    kMaxTokens, ", got ", *job.tokens);
  } else {
    check_positive("sequence", job.sequence);
    check_positive("micro_batch", job.micro_batch);
    CROSSDOCK_CHECK(job.sequence <= kMaxTokens, "sequence must be at most ", kMaxTokens, ", got ",
                    job.sequence);
    CROSSDOCK_CHECK(job.micro_batch <= kMaxTokens / job.sequence, "sequence (", job.sequence,
                    ") times micro_batch (", job.micro_batch, ") must be at most ", kMaxTokens,
                    " tokens; with this sequence the largest "
                    "micro_batch is ",
                    kMaxTokens / job.sequence);
  }
}

int64_t expert_group_size(const JobDescription& job) {
  return job.ep.value_or(job.nodes * job.ranks_per_node / job.pp);
}

int64_t tokens_of_rank(const JobDescription& job) {
  if (job.tokens) return *job.tokens;
  const int64_t shards = job.tp * job.cp;
  return (job.sequence + shards - 1) / shards * job.micro_batch;
}

Topology widest_expert_group(const JobDescription& job) {
  const int64_t size = expert_group_size(job);
  const int64_t num_groups = job.nodes * job.ranks_per_node / size;
  int64_t widest = 0;
  int64_t most_nodes = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first_node = group * size / job.ranks_per_node;
    const int64_t last_node = (group * size + size - 1) / job.ranks_per_node;
    if (last_node - first_node + 1 <= most_nodes) continue;
    most_nodes = last_node - first_node + 1;
    widest = group;
  }
  Topology topology;
  topology.num_nodes = static_cast<int>(most_nodes);
  const int64_t first_node = widest * size / job.ranks_per_node;
  for (int64_t rank = widest * size; rank < (widest + 1) * size; ++rank) {
    topology.node_of_rank.push_back(static_cast<int>(rank / job.ranks_per_node - first_node));
  }
  return topology;
}

}  // namespace crossdock
