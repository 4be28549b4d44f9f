#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/group.hpp"
#include "crossdock/router.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

/// A whole MoE layer. Set E, K and D in `router` and the dtype in `experts`; the layer fills in the
/// same fields of the other parts. Must be identical on every rank, except `experts.recompute` and,
/// with tokens in host memory, `overlap_shared`.
struct MoeLayerConfig {
  RouterConfig router{};
  ExpertsConfig experts{};        // inner is F of a whole expert, even with etp > 1
  DispatchConfig dispatch{};      // alignment, capacity, placement, ...
  std::string strategy = "auto";  // or the name of one of MoeLayerOptions::candidates
  int64_t shared_inner = 0;       // F of the shared experts, one dense MLP; 0: none
  /// The shared experts compute while the dispatch moves rows. Same bits either way.
  bool overlap_shared = true;
  /// If above 1, dispatch moves rows in at most this many chunks of whole local experts (see
  /// DispatchArgs::num_chunks), and the experts compute on rows that have arrived while others are
  /// in transit, in forward and backward. At least 1. Same bits either way.
  int64_t overlap_chunks = 1;
  /// Expert tensor parallelism: the number of ranks that share each expert. The group has etp * ep
  /// ranks, etp fastest: the experts of ep rank r live on ranks r * etp to r * etp + etp - 1, each
  /// of which holds one shard of them (see expert_shards.hpp). `dispatch.placement` refers to ep
  /// ranks. Router, capacity, drops and loads see whole experts. At least 1; F must be at least
  /// etp.
  int64_t etp = 1;
  /// A forward refuses tokens that are bit-identical on several ranks of the group or of
  /// MoeLayerOptions::counting_group: replicated tokens would count several times in the experts'
  /// gradients. See MoeLayerOptions::replicated_over for such tokens. Ranks with fewer than 8
  /// tokens are not compared: they may be equal by chance. true: equal tokens are accepted as
  /// distinct tokens.
  bool allow_equal_tokens = false;
};

/// Parameters: views of memory that the caller owns.
struct MoeLayerWeights {
  GateWeights gate{};
  ConstTensorView expert_bias{};  // [E], optional, for the selection only (see RouteArgs)
  /// Parameters of this rank's experts, ascending; with etp > 1 this rank's shard of them. b2 is
  /// then identical on the etp ranks, and the first of them adds it.
  ExpertWeights experts{};
  ExpertWeights shared{};  // with shared_inner: E_local = 1
};

/// Outputs for the gradients of the parameters, in fp32 (fp64 if the layer is fp64). All are
/// optional: gradients whose view is unset are not computed. With MoeLayerOptions::replicated_over,
/// "this rank's tokens" means its slice of them.
struct MoeLayerGradients {
  TensorView gate{};       // [E, D]; summed over this rank's tokens only
  TensorView gate_bias{};  // [E]; summed over this rank's tokens only
  /// Summed over the tokens of all ranks of the group: complete for this group. With etp > 1, the
  /// gradients of this rank's shard; b2 is identical on the etp ranks and must not be summed over
  /// them.
  ExpertGradients experts{};
  ExpertGradients shared{};  // summed over this rank's tokens only
};

/// The router's choice and the plan that the ranks agreed on. Cheap to copy. Pass it to a second
/// forward of the same tokens (recomputation), which then skips router and plan.
///
/// For tokens on a GPU the numbers stay there: `statistics` and `losses` have device values,
/// `device_load` replaces `load`, and the other numbers are 0 or empty. `on_host` copies them to
/// the host.
struct CROSSDOCK_API MoeDecision {
  std::shared_ptr<const RouterOutput> router;
  /// Routes and tokens that the auxiliary loss counts: those of the counting group and, with
  /// BalanceScope::kGlobalBatch, those of `MoeForwardArgs::earlier`. With several losses, the
  /// counts of the widest scope: the global batch, else the batch.
  RouterStatistics statistics;
  /// In the counting group, or in the sequence_group if set. Fractional if sequences are partly
  /// replicated in other groups.
  double total_sequences = 0.0;
  int64_t total_tokens = 0;   // of this forward in the counting group, without padding
  std::vector<int64_t> load;  // [E] routes before any drop, summed over the group
  RouterLosses losses;        // this rank's share; the shares of the counting group sum to its loss
  /// With etp > 1 a plan of virtual experts, see expert_shards.hpp.
  Plan plan;
  std::vector<int64_t> dropped;  // [E] routes of this rank dropped by capacity, each counted once
  // Counts of the narrower scopes, if the layer has several auxiliary losses.
  std::optional<RouterStatistics> batch_statistics;
  std::optional<RouterStatistics> sequence_statistics;
  RouterStatistics device_load;  // on a GPU: routes and tokens of the group, as one sequence

  /// A copy with all numbers in host memory. Waits for `stream`, the layer's, if the tokens are on
  /// a GPU. Not possible during graph capture.
  [[nodiscard]] MoeDecision on_host(Stream stream = {}) const;

  LossCounts loss_counts() const {
    return {.statistics = &statistics,
            .total_sequences = total_sequences,
            .total_tokens = total_tokens,
            .batch = batch_statistics ? &*batch_statistics : nullptr,
            .sequence = sequence_statistics ? &*sequence_statistics : nullptr};
  }
};

/// Results of one forward that its backward needs. The tokens x are not copied: the caller keeps
/// them. The experts' result is not kept.
struct MoeSaved {
  MoeDecision decision{};
  DispatchResult sent{};  // rows [R, D]
  ExpertsSaved experts{};
  ExpertsSaved shared{};
  DispatchResult grad_y{};  // after a backward with delay_dw: grad_out at the rows [R, D]
};

/// Tokens x may also be [B, L, D] instead of [T, D], with T = B * L. Results then have that shape,
/// and masks and ids may be [B, L] or [B, L, K]. The same holds for backward.
struct MoeForwardArgs {
  MoeLayerWeights weights{};
  ConstTensorView x{};     // [T, D]
  TensorView out{};        // [T, D], optional
  ConstTensorView mask{};  // [T] bool, optional: true = padding

  // For the router, all optional; see RouteArgs.
  ConstTensorView sequence_ids{};  // [T] int32
  int64_t num_sequences = 1;
  /// Number of sequences in the counting group, identical on its ranks; 0: the layer counts them.
  /// By default every rank has its own sequences. The ranks of MoeLayerOptions::sequence_group, or
  /// else counting_group, share the sequences and number them identically, and each sequence counts
  /// once.
  int64_t total_sequences = 0;
  ConstTensorView forced_ids{};  // [T, K]
  ConstTensorView token_ids{};   // [T] int64
  uint64_t jitter_seed = 0;

  /// For BalanceScope::kGlobalBatch: the step's routes and tokens so far, which are added to those
  /// of this forward. Pass `decision.statistics` of the step's previous forward, which includes all
  /// earlier ones, identical on all ranks of the counting group; null for the first of a step.
  const RouterStatistics* earlier = nullptr;

  /// The decision of an earlier forward of these tokens by this layer, whose routes and plan are
  /// used again.
  const MoeDecision* decision = nullptr;
};

struct MoeForwardResult {
  OwnedTensor out;  // [T, D]; zeros for tokens without routes, plus the shared experts' result
  MoeSaved saved;
};

struct MoeBackwardArgs {
  MoeLayerWeights weights{};   // as in forward
  ConstTensorView x{};         // [T, D] as in forward
  ConstTensorView grad_out{};  // [T, D]
  MoeSaved* saved = nullptr;   // from a forward of this layer; consumed, except for backward_dw
  MoeLayerGradients grads{};   // of the parameters
  bool accumulate = false;     // adds to `grads` instead of overwriting them
  bool delay_dw = false;       // leaves `grads` of the experts and shared experts to backward_dw
  double grad_losses = 1.0;    // factor on the gradients of the router's losses
  TensorView grad_x{};         // out [T, D], optional
};

struct MoeBackwardDwArgs {
  ConstTensorView x{};         // [T, D] as in forward
  ConstTensorView grad_out{};  // [T, D] as in backward
  const MoeSaved* saved = nullptr;
  ExpertGradients experts{};
  ExpertGradients shared{};
  bool accumulate = false;
};

struct MoeLayerOptions {
  std::unique_ptr<Strategy> strategy{};  // your own; default: the one the configuration names
  /// The strategies that MoeLayerConfig::strategy chooses from; identical on every rank.
  StrategyList candidates = built_in_strategies();
  std::shared_ptr<ThreadPool> pool{};  // default: the group's
  /// The counting group: the ranks over which the losses count routes, tokens and sequences,
  /// including this rank. Must outlive the layer. Default: the layer's group; with
  /// BalanceScope::kSequence, each rank then counts the routes of its own sequences, and the loss
  /// is the mean over all sequences of the group.
  Group* counting_group = nullptr;
  /// For BalanceScope::kSequence: the ranks that share sequences, if they are not those of the
  /// counting group. Includes this rank and must outlive the layer. The loss is the mean over the
  /// sequences of this group. Default: counting_group, else replicated_over.
  Group* sequence_group = nullptr;
  /// Tensor parallelism without sequence shards: the ranks on which the tokens are replicated,
  /// including this rank. Must outlive the layer, and need not be part of the layer's group. Every
  /// rank passes the same x, mask and other token tensors; rank r of n takes part with tokens
  /// [min(r * c, T), min(r * c + c, T)), c = ceil(T / n), and the results of all slices are
  /// gathered, so that out is complete on every rank. In backward, grad_out must be complete and
  /// identical on these ranks, and the layer reads only this rank's slice of it; grad_x is complete
  /// on every rank and must not be summed over them. Gradients of the gate and of shared experts,
  /// losses and drops are those of this rank's slice; loads and the experts' gradients count each
  /// token once. `forced_ids`, `token_ids` and the default token ids are those of all T tokens.
  /// Tokens or gradients that differ between these ranks are refused: the ranks compare T and a
  /// hash of up to 16 rows.
  Group* replicated_over = nullptr;
  DeviceOptions device{};  // for tokens on a GPU; see MoeLayer::set_device_options
};

/// Router, dispatch, experts and combine, forward and backward.
///
/// forward and backward are collective: all ranks of the group call them in the same order, even
/// ranks without tokens or experts. If an input or the configuration is invalid on any rank, all
/// ranks throw the same error before any row has moved, and the group stays usable; an invalid
/// configuration is reported by the first call, not by the constructor. A failure later in a call
/// (out of memory, a lost rank) is also reported on all ranks and poisons the group. A layer with
/// overlap starts one thread, at its first call.
///
/// An output must not overlap an input or another output. Each forward has one backward. A layer
/// has no state except its configuration: any number of layers may share a group, and any number of
/// backwards may be pending. Only one thread at a time may use a layer. The group must outlive the
/// layer.
///
/// Tokens on a GPU: all tensors of a call must be on that GPU, and the tokens of all ranks must be
/// on GPUs.
/// - Calls queue their work in the stream of the device options, in order, and do not wait for the
///   GPU if `dispatch.max_rows` is set (see Dispatcher for the plans that wait regardless), except
///   that the first forward reads the tokens to compare them (see allow_equal_tokens). They can be
///   captured in one graph and replayed with other tokens and weights in the same memory; the layer
///   and all results must live as long as the graph.
/// - For its backward a forward keeps the routes, the rows x at their experts [R, D], and W1 x
///   [R, 2F or F] unless `experts.recompute` is set, with R = max_rows.
/// - overlap_shared and overlap_chunks work as in host memory, on streams; see docs/gpu.md.
/// - Gradients of w1 and w2 may be in the dtype of the experts (see ExpertGradients).
/// - With counting_group, sequence_group or replicated_over, ranks do not run ahead
///   (DeviceOptions::run_ahead). Replicated tokens and gradients are compared in the first
///   forward and backward only, and need token_ids if the router has jitter.
/// - Per-sequence losses need MoeForwardArgs::total_sequences if each rank of a group has its own
///   sequences, or if replicated_over crosses groups and there is no sequence_group.
/// - fp64 is refused.
///
/// The bits of out, grad_x and the experts' gradients do not depend on strategy, communicator or
/// threads, nor on the number of ranks if they hold the same tokens in the same order. They do
/// depend on etp, which determines how sums over F are split.
class CROSSDOCK_API MoeLayer {
 public:
  MoeLayer(Group& group, MoeLayerConfig config, MoeLayerOptions options = {});
  ~MoeLayer();
  MoeLayer(const MoeLayer&) = delete;
  MoeLayer& operator=(const MoeLayer&) = delete;

  /// The configuration with all fields filled in.
  const MoeLayerConfig& config() const;
  /// The groups, other than the layer's own, in which a forward agrees on its counts, in this
  /// order: the sequence group and the counting group, if the losses need them.
  std::vector<Group*> counting_groups() const;

  /// Applies to later calls with tokens on a GPU, as Dispatcher::set_device_options.
  void set_device_options(const DeviceOptions& options);

  /// As Dispatcher::agree. For callers that refuse a forward ("route") or backward
  /// ("layer_backward") whose arguments they cannot make. Collective.
  void agree(const Proposal& proposal, Device device);

  /// x [T, D] -> out [T, D].
  [[nodiscard]] MoeForwardResult forward(const MoeForwardArgs& args);

  /// grad_out [T, D] -> grad_x [T, D], and the gradients of the parameters. The result is
  /// `args.grad_x` if the caller set it, and may be ignored.
  OwnedTensor backward(const MoeBackwardArgs& args);

  /// Computes the gradients that a backward with delay_dw postponed, at any later time. Not
  /// collective.
  void backward_dw(const MoeBackwardDwArgs& args) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace crossdock
