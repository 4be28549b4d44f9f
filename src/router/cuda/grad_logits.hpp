#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "router/cuda/balance.hpp"
#include "router/cuda/grad_parts.hpp"
#include "router/cuda/score_rules.hpp"

namespace crossdock::router {

/// The gradient of <grad_weights, weights> + grad_losses * (aux + z) by the logits.
struct GradLogitsArgs {
  const float* logits;        // [T, E]
  const int32_t* expert_ids;  // [T, K]
  const int32_t* sequences;   // [T]; -1: padding
  const float* grad_weights;  // [T, K] or null
  int64_t T;
  ScoreRules rules;
  BalanceArgs balance;
  float grad_losses;

  float* grad_logits;  // out: [T, E]; null: not needed
  GradParts parts;     // out: of them, or none
};

void load_grad_logits();
void launch_grad_logits(const GradLogitsArgs& args, cudaStream_t stream);

}  // namespace crossdock::router
