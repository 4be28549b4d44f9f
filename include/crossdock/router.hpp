#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

/// Function from logits to scores. The scores select the experts and weight them.
enum class Score : uint8_t {
  kSoftmax,           // over all experts, before the selection
  kSoftmaxAfterTopK,  // selects by logits, softmax over the selected
  kSigmoid,
  kSqrtSoftplus  // sqrt(log(1 + exp(logit)))
};

inline constexpr std::array<std::string_view, 4> kScoreNames = {"softmax", "softmax_after_top_k",
                                                                "sigmoid", "sqrt_softplus"};

constexpr std::string_view name_of(Score score) {
  return kScoreNames[static_cast<size_t>(score)];
}

/// Score of a group of experts, for the selection of groups.
enum class GroupScore : uint8_t {
  kTopShare,  // sum of its K / group_top_k best biased scores; group_top_k must divide K
  kTop2       // sum of its 2 best
};

/// Tokens whose routes the auxiliary loss counts; the formula is always the same (see
/// RouterStatistics, and MoeForwardArgs::earlier).
enum class BalanceScope : uint8_t {
  kBatch,       // all tokens of a micro-batch, on the ranks of the counting group
  kSequence,    // each sequence separately; the loss is the mean over sequences
  kGlobalBatch  // like kBatch, plus the step's earlier micro-batches
};

/// One value for each scope of the auxiliary loss.
struct BalanceTerms {
  double batch = 0.0;
  double sequence = 0.0;
  double global_batch = 0.0;

  double& of(BalanceScope scope) {
    if (scope == BalanceScope::kBatch) return batch;
    return scope == BalanceScope::kSequence ? sequence : global_batch;
  }
  double of(BalanceScope scope) const { return BalanceTerms(*this).of(scope); }
};

struct RouterConfig {
  int64_t num_experts = 0;    // E
  int64_t top_k = 0;          // K
  int64_t width = 0;          // D
  DType dtype = DType::kF32;  // of x: fp64, fp32, bf16 or fp16; logits are fp32, fp64 for fp64

  Score score = Score::kSoftmax;
  int64_t num_groups = 1;  // G; experts are selected from the best group_top_k groups only
  int64_t group_top_k = 1;
  GroupScore group_score = GroupScore::kTopShare;
  /// If K > 1, weights are divided by (their sum + 1e-20). Unset: true for kSigmoid and
  /// kSqrtSoftplus, false otherwise.
  std::optional<bool> normalise = {};
  double scaling = 1.0;  // factor on the final weights

  double aux_loss_coeff = 0.0;
  BalanceScope aux_loss_scope = BalanceScope::kBatch;
  /// Coefficients of several auxiliary losses at once, one per scope. aux_loss_coeff is added to
  /// the coefficient of aux_loss_scope.
  BalanceTerms aux_loss_coeffs = {};
  double z_loss_coeff = 0.0;

  /// For the logits, x is multiplied by random factors in [1 - jitter, 1 + jitter).
  double jitter = 0.0;
  /// For benchmarks: slot k of token t goes to expert (t * K + k) mod E; weights from the scores.
  bool force_balance = false;

  bool normalises() const {
    if (top_k <= 1 || score == Score::kSoftmaxAfterTopK) return false;
    return normalise.value_or(score == Score::kSigmoid || score == Score::kSqrtSoftplus);
  }
  /// Coefficient of the auxiliary loss of a scope; 0: none.
  double aux_coeff(BalanceScope scope) const {
    return (scope == aux_loss_scope ? aux_loss_coeff : 0.0) + aux_loss_coeffs.of(scope);
  }
  /// Whether routes are counted for a scope: the scope of aux_loss_scope, and those of
  /// aux_loss_coeffs. aux_loss_scope without a coefficient gives way to other scopes if it is
  /// kBatch, the default.
  bool counts(BalanceScope scope) const {
    if (aux_coeff(scope) != 0.0) return true;
    const bool is_default =
        aux_loss_scope == BalanceScope::kBatch &&
        (aux_loss_coeffs.sequence != 0.0 || aux_loss_coeffs.global_batch != 0.0);
    return scope == aux_loss_scope && !is_default;
  }
};

/// Numbers of routes and tokens, from which the auxiliary loss and the expert bias are computed.
/// Additive: for a loss over several ranks or micro-batches, add up their statistics.
struct CROSSDOCK_API RouterStatistics {
  int64_t num_sequences = 1;                    // B; 1 unless routes are counted per sequence
  std::vector<int64_t> routes_per_expert = {};  // [B, E], before any drop
  std::vector<int64_t> num_tokens = {};         // [B], without padding

  /// [E] routes to each expert, over all sequences.
  [[nodiscard]] std::vector<int64_t> load() const;
  /// Adds the statistics of another rank or micro-batch, which must have the same sequences.
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
  /// [E] fp32 (fp64 if x is fp64), optional: added to the scores for the selection only.
  ConstTensorView expert_bias = {};
  /// [T] bool, optional: true = padding, which is ignored.
  ConstTensorView mask = {};
  /// [T] int32: the sequence of each token, in [0, num_sequences). Read with a loss of
  /// BalanceScope::kSequence only, and required there if num_sequences > 1. Ranks that share
  /// sequences must number them identically.
  ConstTensorView sequence_ids = {};
  int64_t num_sequences = 1;  // B
  /// [T, K] int32 or int64, optional: routes to use instead of the selection (-1: none), e.g. the
  /// expert_ids of an earlier step; distinct per token. Weights come from the scores.
  ConstTensorView forced_ids = {};
  uint64_t jitter_seed = 0;  // use a different seed in every step
  /// [T] int64, optional: identifies each token for the jitter. Default: 0 to T - 1.
  ConstTensorView token_ids = {};
};

/// The routes of T tokens, and the values that backward needs.
struct CROSSDOCK_API RouterOutput {
  int64_t T = 0;
  int64_t K = 0;
  int64_t E = 0;
  DType weight_dtype = DType::kF32;     // fp32, or fp64 for fp64 tokens
  Buffer expert_ids;                    // [T, K] int32, best first; -1 in padding
  Buffer weights;                       // [T, K] in weight_dtype; 0 in slots without a route
  Buffer logits;                        // [T, E] in weight_dtype; undefined in padding
  std::vector<int32_t> sequences = {};  // [T] the token's sequence; -1: padding
  std::vector<int64_t> token_ids = {};  // [T] with jitter only
  uint64_t jitter_seed = 0;
  RouterStatistics statistics;  // of this rank

  /// For Dispatcher::plan; valid as long as this object.
  [[nodiscard]] Routing routing() const&;
  Routing routing() const&& = delete;
};

/// The counts that the losses are computed from.
struct LossCounts {
  /// Summed over the group; null: this rank only. The ranks' losses sum to the group's loss. With
  /// BalanceScope::kGlobalBatch, include the step's earlier micro-batches and set `total_tokens`.
  const RouterStatistics* statistics = nullptr;
  /// Sequences in the group, for the mean of the per-sequence loss; 0: the number of sequences with
  /// tokens in `statistics`.
  int64_t total_sequences = 0;
  /// Tokens of this micro-batch in the group, for the mean of the z-loss; 0: the number of tokens
  /// in `statistics`.
  int64_t total_tokens = 0;
  /// With several auxiliary losses: the counts of one of them, if they are not those of
  /// `statistics`. Counts of several sequences are added up for the other two losses.
  const RouterStatistics* batch = nullptr;
  const RouterStatistics* sequence = nullptr;
  const RouterStatistics* global_batch = nullptr;

  /// The counts of a loss; null: this rank only.
  const RouterStatistics* of(BalanceScope scope) const {
    const RouterStatistics* own = global_batch;
    if (scope == BalanceScope::kBatch) own = batch;
    if (scope == BalanceScope::kSequence) own = sequence;
    return own != nullptr ? own : statistics;
  }
};

struct RouterLosses {
  double aux = 0.0;  // the sum of aux_terms
  double z = 0.0;
  BalanceTerms aux_terms = {};  // each auxiliary loss
};

struct RouterBackwardArgs {
  ConstTensorView x = {};  // [T, D] as in route
  GateWeights gate = {};
  const RouterOutput* output = nullptr;
  ConstTensorView grad_weights = {};  // [T, K] as RouterOutput::weights, optional: from combine
  LossCounts counts = {};             // as in losses
  double grad_losses = 1.0;           // factor on the gradients of all losses

  TensorView grad_x = {};  // out [T, D] dtype of x, optional
  bool accumulate_x = false;
  TensorView grad_gate = {};  // out [E, D] fp32 (fp64 for fp64), optional
  TensorView grad_bias = {};  // out [E], likewise
  bool accumulate_gate = false;
  TensorView grad_logits = {};  // out [T, E] fp32 (fp64 for fp64), optional
};

/// Decides which experts each token goes to, and their weights.
///
/// A token's routes depend on that token alone, bit for bit. Among equal scores the lower expert id
/// wins, among equal groups the lower group. Not collective: for a loss over several ranks, the
/// caller sums RouterStatistics over them between route and losses. An output must not overlap an
/// input or another output. Members are thread-safe; any number of backwards may be pending.
/// Invalid arguments throw Error(kInvalidArgument).
class CROSSDOCK_API Router {
 public:
  /// Default pool: ThreadPool::process_wide().
  explicit Router(RouterConfig config, std::shared_ptr<ThreadPool> pool = nullptr);

  const RouterConfig& config() const { return config_; }

  [[nodiscard]] RouterOutput route(const RouteArgs& args) const;

  /// aux = coeff * E / (K T^2) * sum over e of (sum over t of s_te) n_e, with n and T from `counts`
  /// and s of this rank's tokens: the softmax, or scores / sum of scores; summed over the scopes
  /// with a coefficient. z = coeff * mean of logsumexp^2. Without tokens all are 0.
  [[nodiscard]] RouterLosses losses(const RouterOutput& output,
                                    const LossCounts& counts = {}) const;

  /// Computes the gradients of <grad_weights, weights> + grad_losses * (aux + z).
  void backward(const RouterBackwardArgs& args) const;

 private:
  RouterConfig config_ = {};
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<BufferPool> buffers_;
};

struct BiasUpdate {
  double rate = 0.001;
  bool centred = false;  // subtracts the mean of the update from it
};

/// bias[e] += rate * sign(mean load - load[e]). `load` must be summed over all ranks that share the
/// bias.
CROSSDOCK_API void update_expert_bias(TensorView bias, std::span<const int64_t> load,
                                      const BiasUpdate& update);

}  // namespace crossdock
