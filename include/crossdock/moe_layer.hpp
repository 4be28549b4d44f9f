#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/group.hpp"
#include "crossdock/router.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

class SharedExperts;  // internal
class Worker;         // internal

/// A whole MoE layer. E, K and D are said once, in `router`, and the dtype in `experts`; the same
/// fields of the other parts are filled in.
struct MoeLayerConfig {
  RouterConfig router{};
  ExpertsConfig experts{};
  DispatchConfig dispatch{};      // alignment, capacity, placement, ...
  std::string strategy = "auto";  // or one of strategy_names()
  int64_t shared_inner = 0;       // F of the shared experts, one dense MLP; 0: none
  /// The shared experts compute while the dispatch moves rows. Same bits either way.
  bool overlap_shared = true;
  /// More than 1: dispatch moves rows in up to this many chunks of whole local experts (see
  /// DispatchArgs::num_chunks), and the experts compute with those that have landed while the
  /// others travel, in forward and backward. At least 1, alike on all ranks. Same bits either way.
  int64_t overlap_chunks = 1;
};

/// Parameters: views of memory that the caller owns.
struct MoeLayerWeights {
  GateWeights gate{};
  ConstTensorView expert_bias{};  // [E], optional, for the choice only (see RouteArgs)
  ExpertWeights experts{};        // of this rank's experts, ascending
  ExpertWeights shared{};         // with shared_inner: E_local = 1
};

/// Where their gradients go; fp32, or fp64 for fp64. A view that is not given is left out.
struct MoeLayerGradients {
  TensorView gate{};       // [E, D]; of this rank's tokens
  TensorView gate_bias{};  // [E]; likewise
  ExpertGradients experts{};
  ExpertGradients shared{};  // of this rank's tokens
};

/// What the router chose and the ranks agreed on. Cheap to copy. Kept from one forward it makes
/// another of the same tokens (recomputation) without router and plan.
struct MoeDecision {
  std::shared_ptr<const RouterOutput> router;
  /// What the auxiliary loss is counted over: the counting group's routes and tokens, and with
  /// BalanceScope::kGlobalBatch those of `MoeForwardArgs::earlier`.
  RouterStatistics statistics;
  int64_t total_sequences = 0;  // in the counting group
  int64_t total_tokens = 0;     // of this forward in the counting group, without padding
  std::vector<int64_t> load;    // [E] routes before any drop, summed over the group
  RouterLosses losses;          // of this rank's tokens; they sum to those of the counting group
  Plan plan;

  LossCounts loss_counts() const { return {&statistics, total_sequences, total_tokens}; }
};

/// What forward leaves for backward; belongs to one forward. The tokens x are the caller's and are
/// not copied; the experts' result is not kept.
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

  /// Of an earlier forward of these tokens: the same routes, without router and plan.
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
  MoeSaved* saved = nullptr;   // of the forward; used up, but for what backward_dw needs
  MoeLayerGradients grads{};   // of the parameters
  bool accumulate = false;     // they are added to what is there
  bool delay_dw = false;       // those of the experts, shared ones too, are left to backward_dw
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
  std::unique_ptr<Strategy> strategy{};  // your own; not given: the one the configuration names
  std::shared_ptr<ThreadPool> pool{};    // not given: the one of the group
  /// The counting group: the ranks over which the losses count routes, tokens and sequences; this
  /// rank must be among them. Not given: the group of the layer; with BalanceScope::kSequence each
  /// rank counts the routes of its own sequences, and the loss is the mean over all of the group.
  Group* counting_group = nullptr;
};

/// Router, dispatch, experts and combine, forward and backward.
///
/// forward and backward are collective: all ranks of the group call them in the same order,
/// whatever they hold. An invalid input or configuration on any rank is the same error on all,
/// before any row has moved, and the group stays usable. A layer with overlap has one thread of its
/// own, from the first call on. An output must not overlap an input or
/// another output; a forward has one backward. A layer has no state but its
/// configuration: any number of layers may share a group, any number of forwards may wait for their
/// backward. The group must outlive the layer.
///
/// Bits of out, grad_x and the experts' gradients depend on neither strategy, engine nor threads;
/// with the same tokens, spread over the ranks in their order, nor on the number of ranks.
class MoeLayer {
 public:
  MoeLayer(Group& group, MoeLayerConfig config, MoeLayerOptions options = {});
  ~MoeLayer();
  MoeLayer(const MoeLayer&) = delete;
  MoeLayer& operator=(const MoeLayer&) = delete;

  /// With everything filled in.
  const MoeLayerConfig& config() const { return config_; }

  /// x [T, D] -> out [T, D].
  MoeForwardResult forward(const MoeForwardArgs& args);

  /// grad_out [T, D] -> grad_x [T, D], and the gradients of the parameters.
  OwnedTensor backward(const MoeBackwardArgs& args);

  /// After a backward with delay_dw, any time later. Not collective.
  void backward_dw(const MoeBackwardDwArgs& args) const;

 private:
  void build(MoeLayerOptions& options);
  void check(const MoeForwardArgs& args) const;
  void check(const MoeBackwardArgs& args) const;
  MoeDecision decide(const MoeForwardArgs& args);
  bool counts_apart() const;
  bool counts_alone() const;
  std::string counts_text(const MoeForwardArgs& args) const;
  void pass_on_to_counting_group(const MoeForwardArgs& args, const Error& refusal);
  RouterStatistics count_apart(const MoeForwardArgs& args, const RouterStatistics& own);
  void add_up_losses(const MoeForwardArgs& args, const Agreement& agreement, MoeDecision& decision);
  void agree_on_backward(const MoeBackwardArgs& args);
  void finish_backward(const MoeBackwardArgs& args);
  OwnedTensor forward_shared(const MoeForwardArgs& args, MoeSaved& saved);
  OwnedTensor backward_shared(const MoeBackwardArgs& args);
  bool overlaps_shared() const;
  bool overlaps_chunks() const;
  void start_worker();

  Group& group_;
  MoeLayerConfig config_;
  std::optional<Error> flaw_;  // what is wrong with the configuration; refused at the first call
  std::string config_text_;    // what all ranks must have alike
  Group* counting_group_ = nullptr;
  std::unique_ptr<Router> router_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<Experts> experts_;
  std::unique_ptr<SharedExperts> shared_;  // null: none
  std::unique_ptr<Worker> worker_;         // for overlap; started when first needed
};

}  // namespace crossdock
