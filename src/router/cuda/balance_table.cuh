#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "router/cuda/kernels.hpp"
#include "router/cuda/score_row.cuh"

namespace crossdock::router {

/// router::balance_losses on the device: the factors of the losses, and the routes that the losses
/// of the whole batch count. Every block makes its own, in shared memory.
struct BalanceTable {
  double batch_routes[kMaxDeviceExperts];   // [E]
  double global_routes[kMaxDeviceExperts];  // [E]
  float batch_factor;                       // of a share times its routes
  float global_factor;
  float z_factor;  // of logsumexp^2 of a token
  double num_sequences;
};

// By one warp: the tokens of all sequences, and the sequences that have some.
struct TokenTotals {
  int64_t tokens = 0;
  int64_t sequences = 0;

  __device__ explicit TokenTotals(const ScopeCounts& counts) {
    for (int64_t b = lane_id(); b < counts.num_sequences; b += 32) {
      tokens += counts.tokens[b];
      sequences += counts.tokens[b] > 0 ? 1 : 0;
    }
    tokens = warp_sum(tokens);
    sequences = warp_sum(sequences);
  }
};

/// coeff * E / (K * tokens^2 * num_sequences); 0 without tokens.
__device__ inline float aux_factor(double coeff, const ScoreRules& rules, int64_t tokens,
                                   double num_sequences) {
  if (tokens <= 0) return 0.0f;
  const auto count = static_cast<double>(tokens);
  return static_cast<float>(coeff * rules.E / (rules.K * count * count * num_sequences));
}

// By all threads of a block: routes to each expert, over all sequences.
__device__ inline void sum_routes(const ScopeCounts& counts, int32_t E, double* routes) {
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < E;
       e += static_cast<int32_t>(blockDim.x)) {
    int64_t sum = 0;
    for (int64_t b = 0; b < counts.num_sequences; ++b) sum += counts.routes[b * E + e];
    routes[e] = static_cast<double>(sum);
  }
}

/// All threads of the block must call it.
__device__ inline void fill_balance_table(const BalanceArgs& args, const ScoreRules& rules,
                                          BalanceTable& table) {
  if (args.batch.coeff != 0.0) sum_routes(args.batch, rules.E, table.batch_routes);
  if (args.global_batch.coeff != 0.0) {
    sum_routes(args.global_batch, rules.E, table.global_routes);
  }
  if (threadIdx.x < 32) {
    const int64_t batch_tokens = TokenTotals(args.batch).tokens;
    const int64_t global_tokens = TokenTotals(args.global_batch).tokens;
    const int64_t sequences = TokenTotals(args.sequence).sequences;
    if (threadIdx.x == 0) {
      const int64_t z_tokens = args.total_tokens > 0 ? args.total_tokens : batch_tokens;
      table.batch_factor = aux_factor(args.batch.coeff, rules, batch_tokens, 1.0);
      table.global_factor = aux_factor(args.global_batch.coeff, rules, global_tokens, 1.0);
      table.z_factor =
          z_tokens > 0 ? static_cast<float>(args.z_coeff / static_cast<double>(z_tokens)) : 0.0f;
      table.num_sequences =
          args.total_sequences > 0.0 ? args.total_sequences : static_cast<double>(sequences);
    }
  }
  __syncthreads();
}

/// The factor of the loss of one sequence.
__device__ inline float sequence_factor(const BalanceArgs& args, const ScoreRules& rules,
                                        const BalanceTable& table, int32_t sequence) {
  return aux_factor(args.sequence.coeff, rules, args.sequence.tokens[sequence],
                    table.num_sequences);
}

}  // namespace crossdock::router
