#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "crossdock/expert_shards.hpp"
#include "crossdock/moe_layer.hpp"
#include "experts/shared_experts.hpp"
#include "layer/device_memory.hpp"

namespace crossdock {

/// Results of the experts of one forward.
struct ForwardRows {
  OwnedTensor y;         // [R, D]
  OwnedTensor shared_y;  // [T, D]; not given without shared experts
};

/// Results of the experts of one backward.
struct BackwardRows {
  OwnedTensor grad_rows;         // [R, D]
  OwnedTensor grad_row_weights;  // [R]
  OwnedTensor shared_grad_x;     // [T, D]; not given without shared experts
};

/// The objects of a layer, and the computation of its experts with and without overlap. Only the
/// calls of `dispatcher` and functions marked so are collective.
struct LayerParts {
  /// `config` is filled in and outlives this object. Throws Error(kInvalidArgument) for an invalid
  /// configuration.
  LayerParts(Group& group_in, const MoeLayerConfig& config_in, MoeLayerOptions& options);

  /// Throws Error(kInvalidArgument) for tokens on a different GPU than before.
  void check_gpu(Device gpu) const;
  void set_device_options(const DeviceOptions& options);
  /// Call this before a dispatch is queued (see Experts::prepare).
  void prepare_experts(Device gpu);

  /// Whether ranks wait for each other in other groups during calls of the layer. They must not run
  /// ahead then: a rank might wait in one group for a rank that has found an error in another.
  bool meets_elsewhere() const { return !other_groups_.empty(); }
  bool overlaps_shared() const { return shared && config.overlap_shared; }
  bool overlaps_chunks() const { return config.overlap_chunks > 1; }
  /// Whether the dispatch on a GPU runs in its own stream, concurrently with experts.
  bool dispatches_aside(Device device) const {
    return !device.is_cpu() && (overlaps_shared() || overlaps_chunks());
  }
  /// Number of SMs that a dispatch concurrent with experts may use; 0: no limit.
  int dispatch_sms() const {
    return device_options.max_begun_sms > 0 ? device_options.max_begun_sms : device_options.max_sms;
  }
  bool weights_in_experts() const { return config.experts.weights_in == WeightsIn::kExperts; }

  /// Plans the routes in terms of the dispatcher's virtual experts. Collective.
  Plan plan(const RouterOutput& routes);

  /// Sums the experts' results for each token and rounds once, to `out` if given. Collective.
  OwnedTensor combine(const Plan& plan, ConstTensorView y, TensorView out);
  /// The same for the gradients of the rows. Collective.
  OwnedTensor dispatch_backward(const Plan& plan, ConstTensorView grad_rows, TensorView grad_x);
  /// Returns grad_row_weights [R] as the gradients of the routes' weights [T, K]. Collective.
  OwnedTensor collect_weights(const Plan& plan, ConstTensorView grad_row_weights);

  /// Computes the routed experts on all rows of `saved.sent`.
  OwnedTensor forward_experts(const MoeForwardArgs& args, MoeSaved& saved);
  /// Computes their backward on all rows of `args.saved->grad_y`; sets all but shared_grad_x.
  void backward_experts(const MoeBackwardArgs& args, BackwardRows& rows);

  /// Compute the shared experts; the result is not given if there are none.
  OwnedTensor forward_shared(const MoeForwardArgs& args, MoeSaved& saved);
  OwnedTensor backward_shared(const MoeBackwardArgs& args);
  /// Computes the gradients of all experts' parameters.
  void backward_dw(const MoeBackwardDwArgs& args);

  /// Memory for the results, and the arguments of `experts` for the rows that a dispatch delivers.
  ExpertsForwardArgs prepare_forward(const MoeForwardArgs& args, const Plan& plan,
                                     const DispatchResult& sent, OwnedTensor& y);
  ExpertsBackwardDxArgs prepare_backward(const MoeBackwardArgs& args, const DispatchResult& grad_y,
                                         BackwardRows& rows);

  /// Memory for results, on the device of the tokens.
  OwnedTensor take(Device device, DType dtype, const Shape& shape);
  DeviceMemory& memory_of(Device gpu);

  Group& group;
  const MoeLayerConfig& config;
  ExpertShard shard;  // of this rank
  DeviceOptions device_options;
  Stream stream;  // of calls with tokens on a GPU
  std::shared_ptr<ThreadPool> pool;
  Router router;
  Experts experts;
  std::optional<SharedExperts> shared;
  Dispatcher dispatcher;

 private:
  // The arguments of a call of the shared experts on a GPU; keep `segment` until it returns.
  SharedExperts::OnDevice on_device(const ConstTensorView& x, OwnedTensor& segment);

  // Dtype of the experts' results: the dtype of the sums if etp > 1, because they are partial.
  DType result_dtype() const;
  // The weights that this shard computes with: only the first shard adds b2.
  ExpertWeights shard_weights(const ExpertWeights& weights) const;
  // Where the dispatcher writes sums of results.
  TensorView sum_output(const TensorView& out) const;
  OwnedTensor round(OwnedTensor sums, const TensorView& out);
  ShardedRoutes shard_on_gpu(const Routing& routing);

  std::vector<Group*> other_groups_;             // of losses and replicated tokens
  bool are_experts_prepared_ = false;            // for the stream
  std::unique_ptr<DeviceMemory> device_memory_;  // made by the first call on a GPU
  Device gpu_;                                   // of that call
};

/// [E] The routes to whole experts that a plan of virtual experts dropped. May wait for a GPU.
std::vector<int64_t> drops_of_experts(const Plan& plan, int64_t num_experts);

/// The id of a plan, for Proposal::subject; 0 without one.
inline uint64_t id_of(const Plan& plan) {
  return plan.valid() ? plan.id() : 0;
}

/// Whether any gradient was requested.
bool any_given(const ExpertGradients& grads);

}  // namespace crossdock
