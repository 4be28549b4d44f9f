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

/// Function from logits to scores. The scores select the experts and determine their weights.
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

  bool operator==(const BalanceTerms&) const = default;
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

  /// To compute the logits, x is multiplied by random factors in [1 - jitter, 1 + jitter).
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
  /// Whether routes are counted for a scope: aux_loss_scope, and the scopes of aux_loss_coeffs. If
  /// aux_loss_scope is kBatch, the default, and has no coefficient, other scopes take precedence.
  bool counts(BalanceScope scope) const {
    if (aux_coeff(scope) != 0.0) return true;
    const bool is_default =
        aux_loss_scope == BalanceScope::kBatch &&
        (aux_loss_coeffs.sequence != 0.0 || aux_loss_coeffs.global_batch != 0.0);
    return scope == aux_loss_scope && !is_default;
  }

  bool operator==(const RouterConfig&) const = default;
};

/// Counts of routes and tokens, from which the auxiliary loss and the expert bias are computed.
/// Additive: for a loss over several ranks or micro-batches, add up their statistics.
///
/// For tokens on a GPU the counts stay there: `device_counts` is set and the vectors are empty.
struct CROSSDOCK_API RouterStatistics {
  int64_t num_sequences = 1;                    // B; 1 unless routes are counted per sequence
  std::vector<int64_t> routes_per_expert = {};  // [B, E], before any drop
  std::vector<int64_t> num_tokens = {};         // [B], without padding
  /// On a GPU: [B * E + B] int64, routes_per_expert and then num_tokens. Read-only; copies of the
  /// statistics share it.
  OwnedTensor device_counts = {};

  bool is_on_device() const { return device_counts.view.given(); }
  /// The counts in host memory. Counts on a GPU are copied, after waiting for `stream`, in which
  /// they are computed. Not possible during graph capture.
  [[nodiscard]] RouterStatistics on_host(Stream stream = {}) const;

  /// [E] routes to each expert, over all sequences. REQUIRES: counts in host memory.
  [[nodiscard]] std::vector<int64_t> load() const;
  /// Adds the statistics of another rank or micro-batch, which must have the same sequences.
  /// REQUIRES: counts in host memory; on a GPU use Router::sum.
  void add(const RouterStatistics& other);
};

/// The gate's parameters.
struct GateWeights {
  ConstTensorView weight = {};  // [E, D] fp64 for fp64 tokens, else fp32, bf16 or fp16
  ConstTensorView bias = {};    // [E] same dtype, optional
};

/// All tensors must be on the device of x. On a GPU, values are not checked: a token whose sequence
/// is not in [0, num_sequences) is treated as padding, and a forced id that is neither -1 nor in
/// [0, E) gets weight 0 and is left for the plan to refuse.
struct RouteArgs {
  ConstTensorView x = {};  // [T, D]
  GateWeights gate = {};
  /// [E] fp32 (fp64 if x is fp64), optional: added to the scores for the selection only.
  ConstTensorView expert_bias = {};
  /// [T] bool, optional: true = padding, which is ignored.
  ConstTensorView mask = {};
  /// [T] int32: the sequence of each token, in [0, num_sequences). Read only with a loss of
  /// BalanceScope::kSequence, which requires it if num_sequences > 1. Ranks that share sequences
  /// must number them identically.
  ConstTensorView sequence_ids = {};
  int64_t num_sequences = 1;  // B; with such a loss, B * (E + 1) is at most 2^28
  /// [T, K] int32 or int64, optional: routes to use instead of the selection (-1: none), e.g. the
  /// expert_ids of an earlier step; distinct per token. Weights come from the scores.
  ConstTensorView forced_ids = {};
  /// Use a different seed in every step. A captured graph keeps its seed: change `token_ids`.
  uint64_t jitter_seed = 0;
  /// [T] int64, optional: identifies each token for the jitter. Default: 0 to T - 1.
  ConstTensorView token_ids = {};
  Stream stream = {};  // for tensors on a GPU
};

/// The routes of T tokens, and the values that backward needs, on the device of the tokens.
struct CROSSDOCK_API RouterOutput {
  int64_t T = 0;
  int64_t K = 0;
  int64_t E = 0;
  DType weight_dtype = DType::kF32;  // fp32, or fp64 for fp64 tokens
  Buffer expert_ids;                 // [T, K] int32, best first; -1 in padding
  Buffer weights;                    // [T, K] in weight_dtype; 0 in slots without a route
  Buffer logits;                     // [T, E] in weight_dtype; undefined in padding
  Buffer sequences;                  // [T] int32, the token's sequence; -1: padding
  Buffer token_ids;                  // [T] int64 with jitter; empty: 0 to T - 1
  uint64_t jitter_seed = 0;
  RouterStatistics statistics;  // of this rank
  RouterConfig config = {};     // of the router that made it; other routers refuse it

  Device device() const { return logits.device(); }

  /// For Dispatcher::plan; valid as long as this object.
  [[nodiscard]] Routing routing() const&;
  Routing routing() const&& = delete;
};

/// The counts that the losses are computed from, on the device of the routes.
struct LossCounts {
  /// Summed over the group; null: this rank only. The ranks' losses sum to the group's loss. With
  /// BalanceScope::kGlobalBatch, include the step's earlier micro-batches and set `total_tokens`.
  const RouterStatistics* statistics = nullptr;
  /// Sequences in the group, for the mean of the per-sequence loss; 0: the number of sequences with
  /// tokens in `statistics`. Fractional if ranks of other groups hold parts of a sequence.
  double total_sequences = 0.0;
  /// Tokens of this micro-batch in the group, for the mean of the z-loss; 0: the number of tokens
  /// in `statistics`.
  int64_t total_tokens = 0;
  /// With several auxiliary losses: the counts for one of them, if they differ from `statistics`.
  /// Counts of several sequences are added up for the other two losses.
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

/// For tokens on a GPU the losses stay there: `device_values` is set and the numbers are 0.
struct CROSSDOCK_API RouterLosses {
  double aux = 0.0;  // the sum of aux_terms
  double z = 0.0;
  BalanceTerms aux_terms = {};  // each auxiliary loss
  /// On a GPU: [5] fp64: aux, z, and aux_terms as batch, sequence, global_batch. Read-only.
  OwnedTensor device_values = {};

  bool is_on_device() const { return device_values.view.given(); }
  /// The losses as numbers. Losses on a GPU are copied, after waiting for `stream`, in which they
  /// are computed. Not possible during graph capture.
  [[nodiscard]] RouterLosses on_host(Stream stream = {}) const;
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
  TensorView grad_bias = {};  // out [E], same dtype, optional
  bool accumulate_gate = false;
  TensorView grad_logits = {};  // out [T, E] fp32 (fp64 for fp64), optional
  Stream stream = {};           // for tensors on a GPU
};

/// Decides which experts each token goes to, and their weights.
///
/// A token's routes depend on that token alone, bit for bit. Among equal scores the lower expert id
/// wins, among equal groups the lower group. Not collective: for a loss over several ranks, the
/// caller sums RouterStatistics over them between route and losses. An output must not overlap an
/// input or another output. Members are thread-safe; any number of backwards may be pending.
/// Invalid arguments throw Error(kInvalidArgument).
///
/// Tokens on a GPU are routed there: calls queue their work in `stream` and do not wait, and can be
/// captured in a graph, which must not outlive the router and the results that it fills. On a GPU,
/// fp64, more than 1024 experts or a top_k above 32 throw Error(kUnsupported). See docs/router.md
/// for the sums.
class CROSSDOCK_API Router {
 public:
  /// Default pool: ThreadPool::process_wide(), for tokens in host memory.
  explicit Router(RouterConfig config, std::shared_ptr<ThreadPool> pool = nullptr);

  const RouterConfig& config() const { return config_; }

  [[nodiscard]] RouterOutput route(const RouteArgs& args) const;

  /// aux = coeff * E / (K T^2) * sum over e of (sum over t of s_te) n_e, with n and T from `counts`
  /// and s, the softmax or scores / sum of scores, of this rank's tokens; summed over the scopes
  /// with a coefficient. z = coeff * mean of logsumexp^2. Without tokens all are 0.
  [[nodiscard]] RouterLosses losses(const RouterOutput& output, const LossCounts& counts = {},
                                    Stream stream = {}) const;

  /// Computes the gradients of <grad_weights, weights> + grad_losses * (aux + z).
  void backward(const RouterBackwardArgs& args) const;

  /// The sum of the statistics of two ranks or micro-batches, on the device where both are. They
  /// must have the same sequences.
  [[nodiscard]] RouterStatistics sum(const RouterStatistics& a, const RouterStatistics& b,
                                     Stream stream = {}) const;

 private:
  class Backends;

  RouterConfig config_ = {};
  std::shared_ptr<Backends> backends_;
};

struct BiasUpdate {
  double rate = 0.001;
  bool centred = false;  // subtracts the mean of the update from it
};

/// bias[e] += rate * sign(mean load - load[e]). `load` must be summed over all ranks that share the
/// bias.
CROSSDOCK_API void update_expert_bias(TensorView bias, std::span<const int64_t> load,
                                      const BiasUpdate& update);

/// The same with the load from `statistics`, which must be on the device of the bias. Does not wait
/// for the GPU. On a GPU the bias must be fp32.
CROSSDOCK_API void update_expert_bias(TensorView bias, const RouterStatistics& statistics,
                                      const BiasUpdate& update, Stream stream = {});

}  // namespace crossdock
