#pragma once

#include <cstdint>

#include "crossdock/experts.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

// Expert tensor parallelism (etp): each expert is cut into etp shards on etp ranks. W1 and b1 are
// cut by columns of F (gate and linear rows alike), W2 along F; b2 is replicated. Rows go to all
// etp ranks of their expert, and the partial results are summed on the token's rank.
//
// For the dispatcher, shard j of expert e is the virtual expert e * etp + j, and slot k of a token
// becomes slots k * etp to k * etp + etp - 1. MoeLayer does all of this (MoeLayerConfig::etp); the
// functions here are for parameters, and for callers that use Dispatcher and Experts directly.

/// One of the etp shards of the experts of a rank.
struct ExpertShard {
  int64_t etp = 1;
  int64_t index = 0;  // in [0, etp): the rank in the group, modulo etp
};

/// The experts of a shard: `inner` is its part of F. Shards are contiguous and as even as possible;
/// the first F mod etp of them have one more column. Throws Error(kInvalidArgument) if etp is not
/// in [1, F].
CROSSDOCK_API ExpertsConfig shard_of(const ExpertsConfig& whole, const ExpertShard& shard);

/// Parameters that own their memory.
struct OwnedExperts {
  OwnedTensor w1, w2, b1, b2;

  /// Valid as long as this object.
  [[nodiscard]] ExpertWeights weights() const& {
    return {.w1 = w1.view, .w2 = w2.view, .b1 = b1.view, .b2 = b2.view};
  }
  ExpertWeights weights() const&& = delete;
};

/// A copy of one shard of whole experts: w1 [E_local, 2f or f, D], w2 [E_local, D, f],
/// b1 [E_local, 2f or f] and b2 [E_local, D], with f the shard's part of F, in the layout of
/// `whole` (gate rows, then linear rows, or interleaved). Tensors that are not given are skipped.
/// Any dtype; also for gradients and optimizer state. In host memory.
[[nodiscard]] CROSSDOCK_API OwnedExperts cut_expert_shard(const ExpertsConfig& whole,
                                                          const ExpertShard& shard,
                                                          const ExpertWeights& weights);

/// The inverse: copies a shard to its place in whole experts, for instance to write a checkpoint.
/// Tensors that are not given in `to` are skipped.
CROSSDOCK_API void join_expert_shard(const ExpertsConfig& whole, const ExpertShard& shard,
                                     const ExpertWeights& part, const ExpertGradients& to);

/// The configuration of a dispatcher for a group of `num_ranks` = etp * ep ranks: E * etp virtual
/// experts, K * etp slots. The placement in `config` and the default placement refer to ep ranks.
/// Capacity limits each virtual expert as it would limit its expert. Throws Error(kInvalidArgument)
/// if etp does not divide num_ranks.
CROSSDOCK_API DispatchConfig shard_experts(const DispatchConfig& config, int64_t etp,
                                           int num_ranks);

/// Routes to virtual experts.
struct ShardedRoutes {
  OwnedTensor expert_ids;  // [T, K * etp] int32 or int64, as given
  OwnedTensor weights;     // [T, K * etp]; each weight repeated etp times

  /// Valid as long as this object and the mask of the original routing.
  [[nodiscard]] Routing routing(ConstTensorView mask = {}) const& {
    return {.expert_ids = expert_ids.view, .weights = weights.view, .mask = mask};
  }
  Routing routing(ConstTensorView mask = {}) const&& = delete;
};

/// Repeats each route [T, K] for the etp shards of its expert; -1 stays -1. In host memory.
[[nodiscard]] CROSSDOCK_API ShardedRoutes shard_routes(const Routing& routing, int64_t etp);

/// out[t, k] = the sum of values[t, k * etp + j] over j, ascending, in their dtype, fp32 or fp64:
/// the gradient of a weight from those of its shards. In host memory.
CROSSDOCK_API void sum_over_shards(ConstTensorView values, TensorView out);

}  // namespace crossdock
