#pragma once

// The kernels of the router: arguments, loading and launch of each.

#include <cuda_runtime.h>

#include <cstdint>

#include "crossdock/dtype.hpp"
#include "crossdock/router.hpp"
#include "ops/cuda/hopper/operands.hpp"

namespace crossdock::router {

/// A warp holds a row of E logits in registers, and a lane one slot.
inline constexpr int kMaxDeviceExperts = 1024;
inline constexpr int kMaxDeviceSlots = 32;

/// How logits become scores, and scores weights.
struct ScoreRules {
  Score score;
  bool normalises;
  float scaling;
  int32_t E;
  int32_t K;
};

/// The counts of one auxiliary loss, on the device.
struct ScopeCounts {
  double coeff = 0.0;               // 0: there is no such loss
  const int64_t* routes = nullptr;  // [B, E]
  const int64_t* tokens = nullptr;  // [B]
  int64_t num_sequences = 0;        // B
};

/// The losses of a router.
struct BalanceArgs {
  ScopeCounts batch{};  // its tokens are those of the z-loss, too
  ScopeCounts sequence{};
  ScopeCounts global_batch{};
  double z_coeff = 0.0;
  double total_sequences = 0.0;  // see LossCounts
  int64_t total_tokens = 0;

  constexpr bool has_aux() const {
    return batch.coeff != 0.0 || sequence.coeff != 0.0 || global_batch.coeff != 0.0;
  }
};

/// The random factors on the tokens of a batch (RouterConfig::jitter).
struct BatchJitter {
  float size = 0.0f;  // 0: none
  uint64_t seed = 0;
  const int64_t* token_ids = nullptr;  // [T], on the device; null: 0 to T - 1
};

/// Gradients of the logits as sums of three bf16 numbers each, without rounding
/// (split_product.cuh). The copy engine reads them, so rows are aligned to 16 bytes.
struct GradParts {
  BF16* values = nullptr;  // [3, T, pitch], the smallest parts first; null: there are none
  int64_t pitch = 0;       // elements from token to token, at least E and a multiple of 8
};
inline constexpr int kNumParts = 3;

/// The kernel of the gradient of x holds the parts of all experts in shared memory.
inline constexpr int64_t kMostExpertsInParts = 128;

/// logits = x gate^T + bias.
///
/// Tensor cores multiply bf16 tokens with a bf16 gate, or fp16 with fp16, unless there is jitter;
/// all else is fp32 fma with the bits of the CPU (ops::gemm). The choice depends on types and
/// configuration alone, so that a token's logits depend on that token alone.
struct LogitsArgs {
  const void* x;     // [T, D]
  DType x_dtype;     // fp32, bf16 or fp16
  const void* gate;  // [E, D]
  const void* bias;  // [E] in gate_dtype, or null
  DType gate_dtype;  // fp32, bf16 or fp16
  BatchJitter jitter;
  int64_t T;
  int64_t E;
  int64_t D;

  float* logits;               // out: [T, E]
  unsigned long long* counts;  // out: [num_counts] zero, for launch_choose
  int64_t num_counts;
};

/// Loads the kernels onto the current device.
void load_logits();

/// What kernels may use of the GPU.
struct LogitsMeans {
  ops::hopper::TensorMaps* maps = nullptr;  // where sm_90a kernels can run, else null
  int64_t shared_memory = 0;                // bytes per block
};

void launch_logits(const LogitsArgs& args, const LogitsMeans& means, cudaStream_t stream);

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

// Counts of routes on the device (RouterStatistics::device_counts).

struct SumCountsArgs {
  const int64_t* a;  // [count]
  const int64_t* b;  // [count]
  int64_t count;
  int64_t* sum;  // out: [count]
};

/// Counts of n batches, each as RouterStatistics::device_counts, added up to those of one.
struct SumBatchesKernelArgs {
  const int64_t* counts;  // [n, B * E + B]
  int64_t num_batches;    // n
  int64_t num_sequences;  // B
  int64_t E;
  int64_t* sum;  // out: [E + 1]
};

/// bias[e] += rate * sign(mean load - load[e]), with the bits of the CPU.
struct UpdateBiasArgs {
  const int64_t* routes;  // [B, E]
  int64_t num_sequences;  // B
  int64_t E;
  double rate;
  bool centred;
  float* bias;  // in and out: [E]
};

void load_counts();
void launch_sum_counts(const SumCountsArgs& args, cudaStream_t stream);
void launch_sum_batches(const SumBatchesKernelArgs& args, cudaStream_t stream);
void launch_update_bias(const UpdateBiasArgs& args, cudaStream_t stream);

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

/// grad_x (+)= grad_logits gate, times the jitter. With a bf16 gate on tensor cores, as exact as in
/// fp32 (split_product.cuh); with others fp32 fma.
struct GradXArgs {
  const float* grad_logits;  // [T, E]
  const void* gate;          // [E, D]
  DType gate_dtype;          // fp32, bf16 or fp16
  BatchJitter jitter;
  int64_t T;
  int64_t E;
  int64_t D;
  bool accumulates;

  void* grad_x;   // out: [T, D]
  DType x_dtype;  // fp32, bf16 or fp16
};

void load_grad_x();
void launch_grad_x(const GradXArgs& args, cudaStream_t stream);

/// Tokens are summed in slices, which depend on the shape alone; the slices' sums are added in
/// ascending order.
struct TokenSlices {
  int64_t count;
  int64_t num_tokens;  // of a slice; the last may have fewer
};
TokenSlices gate_slices(int64_t T, int64_t E, int64_t D);
TokenSlices bias_slices(int64_t T);

/// grad_gate (+)= grad_logits^T x. Without jitter, bf16 tokens run on tensor cores, as exact as in
/// fp32 (split_product.cuh); others are fp32 fma.
struct GradGateArgs {
  const float* grad_logits;  // [T, E]
  const void* x;             // [T, D]
  DType x_dtype;             // fp32, bf16 or fp16
  BatchJitter jitter;
  const int32_t* sequences;  // [T]; negative: padding, whose x is not looked at
  int64_t T;
  int64_t E;
  int64_t D;
  bool accumulates;
  TokenSlices slices;
  float* slice_sums;  // scratch, [slices.count, E, D]; not used if there is one slice

  float* grad_gate;  // out: [E, D]
};

/// grad_bias (+)= the sum of grad_logits over tokens, in fp64.
struct GradBiasArgs {
  const float* grad_logits;  // [T, E]
  int64_t T;
  int64_t E;
  bool accumulates;
  TokenSlices slices;
  double* slice_sums;  // scratch, [slices.count, E]

  float* grad_bias;  // out: [E]
};

void load_grad_gate();
void launch_grad_gate(const GradGateArgs& args, cudaStream_t stream);
/// The last step of launch_grad_gate: adds up the sums of several slices.
void launch_sum_gate(const GradGateArgs& args, cudaStream_t stream);
void launch_grad_bias(const GradBiasArgs& args, cudaStream_t stream);

}  // namespace crossdock::router
