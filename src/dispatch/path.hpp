#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Shared by a dispatcher and its paths.
struct PathContext {
  Group& group;
  std::shared_ptr<const DispatchConfig> config;
  std::shared_ptr<Strategy> strategy;  // null only together with a refusal
  std::string config_text;             // must be identical on every rank
  std::optional<Error> refusal{};      // error in the configuration: no plan is made
  DeviceOptions options{};             // GPU options when the path was made
  bool gpus_reach_each_other = true;   // within every node; otherwise rows go through the host
  bool ranks_share_gpus = false;       // some ranks of a node use the same GPU
  bool spans_gpus = false;             // the ranks are on several GPUs
};

/// Throws Error(kInvalidArgument) unless a path with this context made the plan.
void check_plan(const PathContext& context, const Plan& plan);

/// A chunk of a pending dispatch.
struct PendingChunk {
  DispatchChunk experts;
  std::shared_ptr<const void> done;  // next_chunk waits for it; null: the rows have arrived
};

/// What a begun call leaves for finish and next_chunk.
struct Begun {
  std::shared_ptr<const void> done{};  // a marker for Path::finish; null: the call is complete
  std::vector<PendingChunk> chunks{};  // of a dispatch; none: all rows arrive together
};

/// Carries out a dispatcher's calls for the tensors of a plan: in host memory or on a GPU. Members
/// correspond to those of Dispatcher, and are collective where those are.
class Path {
 public:
  virtual ~Path() = default;

  virtual Plan plan(const Routing& routing) = 0;
  virtual Plan plan(const DenseRouting& routing) = 0;

  // If `begun` is given, the call may be queued in a separate stream, which waits for the work that
  // is already in the caller's stream and runs concurrently with later work there.

  /// A path on a GPU leaves it to the dispatcher to call on_chunk, once, with all rows.
  virtual DispatchResult dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) = 0;
  /// combine, combine_unweighted or dispatch_backward; `operation` is the name of the call.
  virtual OwnedTensor gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args,
                                 Begun* begun) = 0;
  virtual CombineBackwardResult combine_backward(const Plan& plan,
                                                 const CombineBackwardArgs& args) = 0;
  virtual OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) = 0;
  virtual void agree_on(const Proposal& proposal) = 0;
  /// (optional) For values on a GPU. Default: throws.
  virtual OwnedTensor all_reduce(const ConstTensorView& /*values*/) {
    throw Error(ErrorCode::kUnsupported, "this strategy takes host tensors, got counts on a GPU");
  }
  /// Not collective.
  virtual OwnedTensor allocate_rows(const Plan& plan, DType dtype) = 0;

  /// (optional) Owners of these tensors' memory, as far as the library allocated it, for a begun
  /// call that uses the tensors until it ends. Default: none, calls are complete when they return.
  virtual std::vector<std::shared_ptr<const void>> owners_of(
      std::span<const ConstTensorView> /*tensors*/) const {
    return {};
  }
  /// Makes the caller's stream wait for a begun call, or for a chunk of it.
  virtual void finish(const std::shared_ptr<const void>& done) = 0;

  /// Sets the stream and limits of later calls.
  virtual void set_options(const DeviceOptions& options) = 0;
  /// Throws the error that the GPU has reported, if any. Does not wait for queued work.
  virtual void check() = 0;
};

/// How the ranks' GPUs relate to each other.
struct GpuRelation {
  bool reach_each_other = true;  // within every node, GPUs reach each other's memory
  bool are_several = false;
  bool are_shared = false;  // some ranks of a node use the same GPU
};

/// Collective; called before a path is made. The result is the same on all ranks. `device` is this
/// rank's. If a rank refuses its device or has an invalid configuration, all ranks throw the same
/// error.
GpuRelation agree_on_gpus(const PathContext& context, Device device);

/// Builds without CUDA throw it instead of calling the functions above and those of strategies that
/// make a path on a GPU.
Error no_cuda_error();

}  // namespace crossdock
