#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "router/cuda/balance.hpp"
#include "router/cuda/score_rules.hpp"

namespace crossdock::router {

/// The losses of T tokens.
struct LossArgs {
  const float* logits;       // [T, E]
  const int32_t* sequences;  // [T]; -1: padding
  int64_t T;
  ScoreRules rules;
  BalanceArgs balance;

  double* partial_sums;  // scratch, [loss_blocks(T), 4]
  double* values;        // out: [5] RouterLosses::device_values
};

/// Blocks that compute the losses. Depends on T alone, as the order of the sums does.
int64_t loss_blocks(int64_t T);

void load_losses();
void launch_losses(const LossArgs& args, cudaStream_t stream);

}  // namespace crossdock::router
