#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "crossdock/router.hpp"
#include "router/cuda/score_rules.hpp"

namespace crossdock::router {

/// Which experts can be chosen.
struct ChoiceRules {
  int32_t num_groups;   // G
  int32_t group_top_k;  // groups to choose from; num_groups: all
  int32_t group_share;  // best experts whose scores are the score of a group
  bool force_balance;
};

/// Scores, choice, weights and counts of T tokens.
struct ChooseArgs {
  const float* logits;          // [T, E]
  const float* expert_bias;     // [E] or null
  const bool* mask;             // [T] true = padding; or null
  const int32_t* sequence_ids;  // [T] or null: all 0
  const void* forced_ids;       // [T, K] int32 or int64, or null
  bool forced_ids_are_64_bit;
  int64_t T;
  int64_t num_sequences;  // B
  ScoreRules rules;
  ChoiceRules choice;

  int32_t* expert_ids;         // out: [T, K]
  float* weights;              // out: [T, K]
  int32_t* sequences;          // out: [T]; -1 in padding
  unsigned long long* counts;  // [B * E + B] RouterStatistics::device_counts, added to
};

void load_choose();
void launch_choose(const ChooseArgs& args, cudaStream_t stream);

}  // namespace crossdock::router
