#pragma once

#include <cstdint>
#include <memory>
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
/// same fields of the other parts. Must be identical on every rank, except `experts.recompute` and
/// `overlap_shared`.
struct MoeLayerConfig {
  RouterConfig router{};
  ExpertsConfig experts{};
  DispatchConfig dispatch{};      // alignment, capacity, placement, ...
  std::string strategy = "auto";  // or the name of one of MoeLayerOptions::candidates
  int64_t shared_inner = 0;       // F of the shared experts, one dense MLP; 0: none
  /// The shared experts compute while the dispatch moves rows. Same bits either way.
  bool overlap_shared = true;
  /// More than 1: dispatch moves rows in up to this many chunks of whole local experts (see
  /// DispatchArgs::num_chunks), and the experts compute with the rows that have arrived while the
  /// others are under way, in forward and backward. At least 1. Same bits either way.
  int64_t overlap_chunks = 1;
};

/// Parameters: views of memory that the caller owns.
struct MoeLayerWeights {
  GateWeights gate{};
  ConstTensorView expert_bias{};  // [E], optional, for the choice only (see RouteArgs)
  ExpertWeights experts{};        // of this rank's experts, ascending
  ExpertWeights shared{};         // with shared_inner: E_local = 1
};

/// Outputs for the gradients of the parameters, in fp32 (fp64 if the layer is fp64). All optional:
/// a gradient whose view is not given is not computed.
struct MoeLayerGradients {
  TensorView gate{};       // [E, D]; summed over this rank's tokens only
  TensorView gate_bias{};  // [E]; likewise
  ExpertGradients experts{};
  ExpertGradients shared{};  // summed over this rank's tokens only
};

/// The router's choice and the plan that the ranks agreed on. Cheap to copy. Give it to a second
/// forward of the same tokens (recomputation), which then needs neither router nor plan.
struct MoeDecision {
  std::shared_ptr<const RouterOutput> router;
  /// The auxiliary loss counts these routes and tokens: those of the counting group and, with
  /// BalanceScope::kGlobalBatch, those of `MoeForwardArgs::earlier`.
  RouterStatistics statistics;
  int64_t total_sequences = 0;  // in the counting group
  int64_t total_tokens = 0;     // of this forward in the counting group, without padding
  std::vector<int64_t> load;    // [E] routes before any drop, summed over the group
  RouterLosses losses;  // this rank's share; the shares of the counting group sum to its loss
  Plan plan;

  LossCounts loss_counts() const { return {&statistics, total_sequences, total_tokens}; }
};

/// Results of one forward that its backward needs. The tokens x stay with the caller and are not
/// copied; the experts' result is not kept.
struct MoeSaved {
  MoeDecision decision{};
  DispatchResult sent{};  // rows [R, D]
  ExpertsSaved experts{};
  ExpertsSaved shared{};
  DispatchResult grad_y{};  // after a backward with delay_dw: grad_out at the rows [R, D]
};

struct MoeForwardArgs {
  MoeLayerWeights weights{};
  ConstTensorView x{};     // [T, D]
  TensorView out{};        // [T, D], optional
  ConstTensorView mask{};  // [T] bool, optional: true = padding

  // For the router, all optional; see RouteArgs.
  ConstTensorView sequence_ids{};  // [T] int32
  int64_t num_sequences = 1;
  /// Sequences in the counting group, identical on its ranks. 0: they are counted. Without a stated
  /// counting group, each rank's sequences are its own; with one, its ranks share the sequences and
  /// number them identically, and a sequence counts once.
  int64_t total_sequences = 0;
  ConstTensorView forced_ids{};  // [T, K]
  ConstTensorView token_ids{};   // [T] int64
  uint64_t jitter_seed = 0;

  /// For BalanceScope::kGlobalBatch: the step's routes and tokens so far, which are added to those
  /// of this forward. Give `decision.statistics` of the step's previous forward (it includes those
  /// before it), identical on all ranks of the counting group; null at the first of a step.
  const RouterStatistics* earlier = nullptr;

  /// The decision of an earlier forward of these tokens: the same routes, without router and plan.
  const MoeDecision* decision = nullptr;
};

struct MoeForwardResult {
  OwnedTensor out;  // [T, D]; zeros where a token has no route, plus the shared experts' result
  MoeSaved saved;
};

struct MoeBackwardArgs {
  MoeLayerWeights weights{};   // as in forward
  ConstTensorView x{};         // [T, D] as in forward
  ConstTensorView grad_out{};  // [T, D]
  MoeSaved* saved = nullptr;   // from the forward; used up, except for what backward_dw needs
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
  /// The counting group: the ranks over which the losses count routes, tokens and sequences; this
  /// rank must be among them. It must outlive the layer. Default: the group of the layer; with
  /// BalanceScope::kSequence each rank then counts the routes of its own sequences, and the loss is
  /// the mean over all sequences of the group.
  Group* counting_group = nullptr;
};

/// Router, dispatch, experts and combine, forward and backward.
///
/// forward and backward are collective: all ranks of the group call them in the same order,
/// whatever they hold. An invalid input or configuration on any rank is the same error on all,
/// before any row has moved, and the group stays usable; an invalid configuration is reported by
/// the first call, not by the constructor. A failure later in a call (no memory, a lost rank)
/// is also reported on all ranks and poisons the group. A layer with overlap starts one thread, at
/// its first call.
///
/// An output must not overlap an input or another output. Each forward has one backward. A layer
/// has no state but its configuration: any number of layers may share a group, and any number of
/// forwards may wait for their backward. A layer is used by one thread at a time. The group must
/// outlive the layer.
///
/// The bits of out, grad_x and the experts' gradients do not depend on strategy, communicator or
/// threads, nor on the number of ranks if these hold the same tokens in the same order.
class CROSSDOCK_API MoeLayer {
 public:
  MoeLayer(Group& group, MoeLayerConfig config, MoeLayerOptions options = {});
  ~MoeLayer();
  MoeLayer(const MoeLayer&) = delete;
  MoeLayer& operator=(const MoeLayer&) = delete;

  /// The configuration with all fields filled in.
  const MoeLayerConfig& config() const;

  /// x [T, D] -> out [T, D].
  [[nodiscard]] MoeForwardResult forward(const MoeForwardArgs& args);

  /// grad_out [T, D] -> grad_x [T, D], and the gradients of the parameters. The result may be
  /// ignored: it is `args.grad_x` if that was given.
  OwnedTensor backward(const MoeBackwardArgs& args);

  /// The gradients that a backward with delay_dw left, at any later time. Not collective.
  void backward_dw(const MoeBackwardDwArgs& args) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace crossdock
