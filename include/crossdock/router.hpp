#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "crossdock/buffer.hpp"
#include "crossdock/router_config.hpp"
#include "crossdock/routing.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

/// How many routes and tokens there are; what the auxiliary loss and the expert bias are made from.
/// Additive: for a loss over several ranks (or micro-batches) sum it over them, field by field.
struct RouterStatistics {
  int64_t num_sequences = 1;                    // B; 1 unless the loss is per sequence
  std::vector<int64_t> routes_per_expert = {};  // [B, E], before any drop
  std::vector<int64_t> num_tokens = {};         // [B], without padding

  /// [E] routes to each expert, over all sequences.
  std::vector<int64_t> load() const;
  /// Adds another rank's or micro-batch's; the sequences must be the same.
  void add(const RouterStatistics& other);
};

/// The gate's parameters.
struct GateWeights {
  ConstTensorView weight = {};  // [E, D] fp64 for fp64 tokens, else fp32, bf16 or fp16
  ConstTensorView bias = {};    // [E] same dtype, optional
};

struct RouteArgs {
  ConstTensorView x = {};  // [T, D]
  GateWeights gate = {};
  /// [E] fp32 (fp64 for fp64), optional: added to the scores for the choice, not for the weights.
  ConstTensorView expert_bias = {};
  /// [T] bool, optional: true = padding, which is ignored.
  ConstTensorView mask = {};
  /// [T] int32: the sequence of each token, in [0, num_sequences). Read with
  /// BalanceScope::kSequence only, and needed there if there is more than one; ranks that share
  /// sequences number them alike.
  ConstTensorView sequence_ids = {};
  int64_t num_sequences = 1;  // B
  /// [T, K] int32 or int64, optional: these routes instead of a choice (-1: none), e.g. the
  /// expert_ids of an earlier step. No id twice in a token. Weights still come from the scores.
  ConstTensorView forced_ids = {};
  uint64_t jitter_seed = 0;  // give another one every step
  /// [T] int64, optional: who a token is for the jitter; otherwise 0..T-1.
  ConstTensorView token_ids = {};
};

/// The routes of T tokens, and what backward needs of them.
struct RouterOutput {
  int64_t T = 0;
  int64_t K = 0;
  int64_t E = 0;
  DType weight_dtype = DType::kF32;     // fp32, or fp64 for fp64 tokens
  Buffer expert_ids;                    // [T, K] int32; the best first; -1 in padding
  Buffer weights;                       // [T, K] in weight_dtype; 0 where there is no route
  Buffer logits;                        // [T, E] in weight_dtype; undefined in padding
  std::vector<int32_t> sequences = {};  // [T] the token's sequence; -1: padding
  std::vector<int64_t> token_ids = {};  // [T] with jitter only
  uint64_t jitter_seed = 0;
  RouterStatistics statistics;  // of this rank

  /// For Dispatcher::plan; valid as long as this object.
  Routing routing() const;
};

/// What the losses are counted over.
struct LossCounts {
  /// Summed over the group; null: this rank alone. The losses of the ranks sum to the group's. With
  /// BalanceScope::kGlobalBatch, also those of the step's earlier micro-batches; then give
  /// `total_tokens`.
  const RouterStatistics* statistics = nullptr;
  /// Sequences in the group, for the mean of the per-sequence loss; 0: those with tokens in
  /// `statistics`.
  int64_t total_sequences = 0;
  /// Tokens of this micro-batch in the group, for the mean of the z-loss; 0: those in `statistics`.
  int64_t total_tokens = 0;
};

struct RouterLosses {
  double aux = 0.0;
  double z = 0.0;
};

struct RouterBackwardArgs {
  ConstTensorView x = {};  // [T, D] as given to route
  GateWeights gate = {};
  const RouterOutput* output = nullptr;
  ConstTensorView grad_weights = {};  // [T, K] as RouterOutput::weights, optional: from the combine
  LossCounts counts = {};             // as given to losses
  double grad_losses = 1.0;           // factor on the gradients of both losses

  TensorView grad_x = {};  // out [T, D] dtype of x, optional
  bool accumulate_x = false;
  TensorView grad_gate = {};  // out [E, D] fp32 (fp64 for fp64), optional
  TensorView grad_bias = {};  // out [E], likewise
  bool accumulate_gate = false;
  TensorView grad_logits = {};  // out [T, E] fp32 (fp64 for fp64), optional
};

/// Decides which experts a token goes to, and how much each counts.
///
/// Logits are products as in ops/gemm.hpp: a token's routes depend on that token alone. Equal
/// scores: the lower expert id wins; equal groups: the lower group. Exchanges nothing: where a loss
/// is over several ranks, the caller sums RouterStatistics over them between route and losses. An
/// output must not overlap an input or another output.
/// Members are thread-safe and not collective; any number of outputs may be in flight.
class Router {
 public:
  /// No pool: the one of the process.
  explicit Router(RouterConfig config, std::shared_ptr<ThreadPool> pool = nullptr);

  const RouterConfig& config() const { return config_; }

  RouterOutput route(const RouteArgs& args) const;

  /// aux = coeff * E / (K T^2) * sum over e of (sum over t of s_te) n_e, with n and T of `counts`,
  /// s of this rank's tokens: the softmax, or scores / sum of scores. z = coeff * mean of
  /// logsumexp^2. 0 where there is no token.
  RouterLosses losses(const RouterOutput& output, const LossCounts& counts = {}) const;

  /// Gradients of <grad_weights, weights> + grad_losses * (aux + z).
  void backward(const RouterBackwardArgs& args) const;

 private:
  RouterConfig config_ = {};
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<BufferPool> buffers_;
};

struct BiasUpdate {
  double rate = 0.001;
  bool centred = false;  // the mean of the update is subtracted from it
};

/// bias[e] += rate * sign(mean load - load[e]). `load` is summed over all ranks that share the
/// bias.
void update_expert_bias(TensorView bias, std::span<const int64_t> load, const BiasUpdate& update);

}  // namespace crossdock
