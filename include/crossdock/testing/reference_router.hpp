#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/router.hpp"

// The router's part of the reference (see reference.hpp): one rank's tokens, plain loops, fp64.

namespace crossdock::reference {

struct RouterInput {
  RouterConfig config = {};  // `jitter` is ignored: pass x as the gate sees it
  int64_t T = 0;
  std::vector<double> x = {};              // [T, D]
  std::vector<double> gate = {};           // [E, D]
  std::vector<double> gate_bias = {};      // [E]; empty: none
  std::vector<double> expert_bias = {};    // [E]; empty: none
  std::vector<uint8_t> mask = {};          // [T]; 1: padding; empty: no padding
  std::vector<int32_t> sequence_ids = {};  // [T]; empty: one sequence
  int64_t num_sequences = 1;               // B
  std::vector<int64_t> forced_ids = {};    // [T, K]; empty: the router selects
};

/// [T, D] the random factors by which x is multiplied for the gate: 1 + jitter * u, with u in
/// [-1, 1) from 24 bits of a hash of seed, token id and column.
CROSSDOCK_API std::vector<double> jitter_factors(const RouterConfig& config, uint64_t seed,
                                                 const std::vector<int64_t>& token_ids);

/// Counts from which the losses are computed, for a group or for one rank.
struct RouterCounts {
  std::vector<int64_t> routes_per_expert = {};  // [B, E]
  std::vector<int64_t> num_tokens = {};         // [B]
  double total_sequences = 0.0;                 // 0: the number of sequences with tokens
  int64_t total_tokens = 0;                     // 0: the sum of num_tokens
};

/// The counts of BalanceScope::kGlobalBatch for the last micro-batch of a step: the routes and
/// tokens of all `micro_batches` [micro-batches][P], summed over ranks. total_tokens, for the
/// z-loss, is that of the last micro-batch.
CROSSDOCK_API RouterCounts
global_batch_counts(const std::vector<std::vector<RouterCounts>>& micro_batches);

struct RouterResult {
  std::vector<double> logits = {};       // [T, E]; 0 in padding
  std::vector<int64_t> expert_ids = {};  // [T, K]; best first; -1 in padding
  std::vector<double> weights = {};      // [T, K]
  RouterCounts counts = {};              // of this rank
};

CROSSDOCK_API RouterResult route(const RouterInput& input);

/// How far the selection is from any other: the smallest |a - b| / (0.1 + max(|a|, |b|)) over the
/// (biased) scores of experts and groups that the selection compares. Infinite without a choice.
CROSSDOCK_API double selection_margin(const RouterInput& input, const RouterResult& result);

struct RouterLossValues {
  double aux = 0.0;
  double z = 0.0;
};

CROSSDOCK_API RouterLossValues router_losses(const RouterInput& input, const RouterResult& result,
                                             const RouterCounts& counts);

struct RouterGradients {
  std::vector<double> logits = {};     // [T, E]
  std::vector<double> x = {};          // [T, D]
  std::vector<double> gate = {};       // [E, D]
  std::vector<double> gate_bias = {};  // [E]
};

/// Gradients of <grad_weights, weights> + grad_losses * (aux + z), with the selection held fixed.
CROSSDOCK_API RouterGradients route_backward(const RouterInput& input, const RouterResult& result,
                                             const std::vector<double>& grad_weights,
                                             const RouterCounts& counts, double grad_losses = 1.0);

}  // namespace crossdock::reference
