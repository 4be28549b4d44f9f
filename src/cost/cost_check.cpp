#include "cost/cost_check.hpp"

#include <algorithm>
#include <limits>

#include "core/check.hpp"
#include "cost/top_k_odds.hpp"
#include "plan/config_check.hpp"

namespace crossdock {
namespace {

// Bytes per second; outside these limits, times and their ratios may not be finite.
constexpr double kLeastRate = 1;
constexpr double kLargestRate = 1e18;

void check_topology(const Topology& topology) {
  CROSSDOCK_CHECK(!topology.node_of_rank.empty(), "a group must have at least one rank, got 0");
  for (size_t rank = 0; rank < topology.node_of_rank.size(); ++rank) {
    const int node = topology.node_of_rank[rank];
    CROSSDOCK_CHECK(node >= 0 && node < topology.num_nodes, "the node of rank ", rank,
                    " must be in [0, ", topology.num_nodes, "), got ", node);
  }
}

void check_links(const CostInputs& inputs) {
  const Fabric& fabric = inputs.fabric;
  const auto is_legal = [](double rate) { return rate >= kLeastRate && rate <= kLargestRate; };
  CROSSDOCK_CHECK(is_legal(fabric.within_node_rate) && is_legal(fabric.between_nodes_rate) &&
                      is_legal(fabric.memory_rate),
                  "the rates of a fabric must be from ", kLeastRate, " to ", kLargestRate,
                  " bytes per second, got ", fabric.within_node_rate, " inside a node, ",
                  fabric.between_nodes_rate, " between nodes and ", fabric.memory_rate,
                  " in memory");
  CROSSDOCK_CHECK(fabric.memory_bytes >= 0,
                  "the memory of a fabric must not be negative (0: no limit is known), got ",
                  fabric.memory_bytes, " bytes");
  CROSSDOCK_CHECK(inputs.mpi.max_in_flight >= 2,
                  "max_in_flight must be at least 2 (one request each way), got ",
                  inputs.mpi.max_in_flight);
  constexpr int64_t kMaxChunkBytes = std::numeric_limits<int>::max();
  CROSSDOCK_CHECK(inputs.mpi.chunk_bytes >= 1 && inputs.mpi.chunk_bytes <= kMaxChunkBytes,
                  "chunk_bytes must be from 1 to ", kMaxChunkBytes, ", got ",
                  inputs.mpi.chunk_bytes);
  CROSSDOCK_CHECK(inputs.staging_bytes > 0, "staging_bytes must be positive, got ",
                  inputs.staging_bytes);
}

void check_skew(const CostInputs& inputs) {
  CROSSDOCK_CHECK(inputs.zipf >= 0 && inputs.zipf <= kMaxZipf, "zipf must be in [0, ", kMaxZipf,
                  "], got ", inputs.zipf);
  const int64_t E = inputs.config.num_experts;
  const int64_t K = inputs.config.top_k;
  CROSSDOCK_CHECK(inputs.zipf == 0 || K <= kMaxSkewedSlots / E,
                  "with zipf, top_k times num_experts must be at most ", kMaxSkewedSlots, ", got ",
                  K, " times ", E, "; the largest top_k is ", kMaxSkewedSlots / E);
  const auto is_short = [&](int64_t top_k) {
    const TopKDraw draw{.top_k = top_k, .zipf = inputs.zipf};
    return draw_steps(E, draw, inputs.config.capacity.has_value()) <= kMaxDrawSteps;
  };
  if (is_short(K)) return;
  int64_t largest = 0;
  for (int64_t too_large = K; too_large - largest > 1;) {
    const int64_t top_k = largest + (too_large - largest) / 2;
    (is_short(top_k) ? largest : too_large) = top_k;
  }
  const std::string advice = largest > 0 ? concat("the largest top_k is ", largest)
                                         : std::string("with so many experts zipf must be 0");
  CROSSDOCK_CHECK(false, "with zipf ", inputs.zipf, ", top_k (", K, ") and num_experts (", E,
                  ") are too large to plan in reasonable time; ", advice);
}

}  // namespace

void check_cost_inputs(const CostInputs& inputs) {
  check_topology(inputs.topology);
  check_config(inputs.config, static_cast<int>(inputs.topology.node_of_rank.size()));
  CROSSDOCK_CHECK(inputs.tokens >= 0 && inputs.tokens <= kMaxTokens, "tokens must be from 0 to ",
                  kMaxTokens, ", got ", inputs.tokens);
  check_skew(inputs);
  check_links(inputs);
}

}  // namespace crossdock
