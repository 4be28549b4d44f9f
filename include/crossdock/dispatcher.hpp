#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

// The life of a dispatcher. Every rank of a group makes one, with the same configuration. A plan
// says where every row of one routing goes. With it, dispatch brings tokens to the ranks of their
// experts, yours or Experts compute, and combine brings the results back; combine_backward and
// dispatch_backward do the same for the gradients. A plan is used with the dispatcher that made it,
// any number of times and in any order with other plans, and may outlive its routing. An invalid
// configuration or an unknown strategy is reported by the first plan(), on all ranks, and not by
// the constructor, which would leave the other ranks waiting. The group outlives the dispatcher;
// several may share it. Rules for tensors on a GPU: docs/gpu.md.

namespace crossdock {

class Strategy;  // see extend/strategy.hpp

/// How a dispatcher works on a GPU. May differ between ranks.
struct DeviceOptions {
  /// All work is queued in this stream, in order. Default: the GPU's default stream; for ranks that
  /// are threads of one process, the calling thread's own (cudaStreamPerThread; see docs/gpu.md).
  Stream stream{};
  /// SM limit (0: none). If the SMs of all ranks of this process fit on their GPU together (on
  /// three quarters of it if a rank uses several streams), calls need no separate barrier kernel.
  int max_sms = 0;
  /// The same for begin_dispatch and begin_combine, which share the GPU with other kernels; 0:
  /// max_sms.
  int max_begun_sms = 0;
  /// An ncclComm_t with the group's ranks, made by this process's libnccl.so.2. alltoall and
  /// allgather exchange all rows through it, direct and hierarchical only rows between nodes. Null:
  /// ranks copy from each other's memory; processes on several nodes make an NCCL communicator of
  /// their own at the first plan. Must be set before the first plan, and must not change
  /// afterwards.
  void* nccl_comm = nullptr;
  /// false: the hosts of the ranks meet in every call, even if they could run ahead (see
  /// Dispatcher). For ranks whose calls also wait for each other in other groups. Identical on
  /// every rank, set before the first plan.
  bool run_ahead = true;
};

struct DispatchResult;

/// A chunk of a dispatch that has arrived: rows of local experts [first_expert, last_expert).
struct DispatchChunk {
  int64_t first_expert = 0;
  int64_t last_expert = 0;
};

/// Inputs and optional outputs of a dispatch. The library allocates the outputs that the caller
/// leaves unset; the `DispatchResult` owns them.
struct DispatchArgs {
  ConstTensorView x{};            // [T, D]; fp64, fp32, bf16, fp16 or fp8 e4m3
  ConstTensorView scales{};       // [T, ceil(D/128)] fp32 or [T, ceil(D/32)] e8m0, with fp8 only
  TensorView rows{};              // out, optional: [R, D]
  TensorView row_scales{};        // out, optional
  TensorView row_weights{};       // out, optional: [R] dtype of the plan's weights
  bool with_row_weights = false;  // also dispatch the weights; required for row_weights

  /// Maximum number of chunks, each of whole local experts, in which rows arrive, so that a rank
  /// can compute on one chunk while later ones are in transit. At least 1, identical on every rank;
  /// never more chunks than the largest number of local experts on any rank. On a GPU, there is
  /// more than one chunk only after begin_dispatch (see next_chunk), with `direct` and
  /// `hierarchical` inside a node.
  int64_t num_chunks = 1;
  /// Called on the calling thread after each chunk, in expert order and equally often on every
  /// rank: set it on all ranks or on none. Receives the result that dispatch will return; all row
  /// weights and the rows of the chunks so far are complete. Peers wait while it runs, so hand the
  /// work to another thread, which must not use the group. An exception, even after the last chunk,
  /// fails the dispatch on all ranks. On a GPU it is called once, and begin_dispatch refuses it.
  std::function<void(const DispatchResult&, const DispatchChunk&)> on_chunk{};
};

struct DispatchResult {
  OwnedTensor rows;         // [R, D], grouped by local expert; pad rows are zero
  OwnedTensor row_scales;   // [R, ...] with fp8
  OwnedTensor row_weights;  // [R] if requested; 0 in pad rows
};

/// Inputs and optional outputs of a combine_backward.
struct CombineBackwardArgs {
  ConstTensorView grad_out{};  // [T, D]
  ConstTensorView y{};         // [R, D] as in combine
  TensorView grad_rows{};      // out, optional: [R, D]
  TensorView grad_weights{};   // out, optional: [T, K] dtype of the plan's weights
};

struct CombineBackwardResult {
  OwnedTensor grad_rows;     // [R, D] = weight * grad_out of the row's token; 0 in pad rows
  OwnedTensor grad_weights;  // [T, K] = <y row, grad_out>; 0 in slots without a kept route
};

struct PendingWork;  // internal

/// A pending call, made by Dispatcher::begin_dispatch or begin_combine. Pass it to finish. If it is
/// destroyed instead, the call ends as with finish, and its result is released; this counts as a
/// use of the dispatcher.
template <typename Result>
class [[nodiscard]] Pending {
 public:
  Pending() = default;

  /// The result that finish will return. Until then, only the rows and row weights of the chunks
  /// that next_chunk has returned may be used.
  const Result& result() const { return result_; }

 private:
  friend class Dispatcher;

  Result result_{};
  std::shared_ptr<PendingWork> work_;  // ends the call when released
};

/// Carries tokens to the ranks that own their experts, and the results back, forward and backward.
///
/// Members that make plans or move rows are collective: all ranks of the group call them in the
/// same order, even ranks without tokens or experts. finish, next_chunk, check, allocate_rows and
/// the accessors are not. If an input is invalid on any rank, all ranks throw the same error before
/// any row has moved. An output must not overlap an input or another output. One thread at a time
/// may use a dispatcher.
class CROSSDOCK_API Dispatcher {
 public:
  Dispatcher(Group& group, DispatchConfig config, std::unique_ptr<Strategy> strategy);
  /// strategy_name is the name of a candidate, or "auto": the candidate with the least cost for
  /// this configuration and topology (see planner.hpp), which strategy().name() returns. With
  /// "auto", candidates must be identical on every rank.
  Dispatcher(Group& group, DispatchConfig config, std::string_view strategy_name,
             const StrategyList& candidates = built_in_strategies());
  ~Dispatcher();
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  const DispatchConfig& config() const;
  Group& group();
  /// Throws if the constructor got an unknown name.
  const Strategy& strategy() const;

  /// Applies to later calls with tensors on a GPU. A new stream waits for the dispatcher's work in
  /// the previous stream, which must still exist.
  void set_device_options(const DeviceOptions& options);
  /// Throws the error that poisoned the group, or an error that a GPU has reported since the last
  /// call, if any. Does not wait for the GPU. If ranks that have run ahead find that a call was
  /// refused or differs, waits until all of them know.
  void check();

  /// Agrees with the other ranks on a larger operation that contains calls of this dispatcher, such
  /// as a layer's forward: a difference or a refusal becomes the same error on all ranks, as with
  /// Group::agree. The proposal has no body. `device` holds the tensors of the operation; on a GPU
  /// ranks may run ahead, and then get the error in a later call. Collective.
  void agree(const Proposal& proposal, Device device);

  /// All ranks agree on the number of rows each receives and on the final row of every route.
  [[nodiscard]] Plan plan(const Routing& routing);
  [[nodiscard]] Plan plan(const DenseRouting& routing);

  /// x [T, D] -> rows [R, D]. The result may be ignored if the caller provided all outputs.
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args);

  /// y [R, D] -> out [T, D]: the sum over each token's routes, weighted by the plan's weights.
  /// Tokens without routes get zeros. The second form writes to `out` and returns it.
  [[nodiscard]] OwnedTensor combine(const Plan& plan, ConstTensorView y);
  OwnedTensor combine(const Plan& plan, ConstTensorView y, TensorView out);

  /// dispatch and combine in two halves, to overlap them with computation. On a GPU, begin queues
  /// the call in a separate stream. There it waits for the work already queued in the stream of
  /// set_device_options and runs concurrently with later work, until finish makes that stream wait
  /// for the result. Inputs and outputs must not be used in between; those in memory that the
  /// library allocated may be released. begin is collective; several calls may be pending, with
  /// others between them. On the CPU, begin completes the call.
  [[nodiscard]] Pending<DispatchResult> begin_dispatch(const Plan& plan, const DispatchArgs& args);
  [[nodiscard]] Pending<OwnedTensor> begin_combine(const Plan& plan, ConstTensorView y,
                                                   TensorView out = {});
  /// The next chunk of a pending dispatch, in expert order; nullopt after the last one. On a GPU it
  /// makes the stream of set_device_options wait for the rows of this chunk, while those of later
  /// chunks are in transit. Every rank has equally many chunks. Does not block the host; not
  /// collective.
  std::optional<DispatchChunk> next_chunk(Pending<DispatchResult>& pending);
  /// Completes a pending call. Does not block the host.
  DispatchResult finish(Pending<DispatchResult> pending);
  OwnedTensor finish(Pending<OwnedTensor> pending);

  /// Like combine with all weights 1 (for experts that applied the weights themselves).
  [[nodiscard]] OwnedTensor combine_unweighted(const Plan& plan, ConstTensorView y);
  OwnedTensor combine_unweighted(const Plan& plan, ConstTensorView y, TensorView out);

  /// Backward of dispatch: grad_rows [R, D] -> grad_x [T, D]. The same as combine_unweighted.
  [[nodiscard]] OwnedTensor dispatch_backward(const Plan& plan, ConstTensorView grad_rows);
  OwnedTensor dispatch_backward(const Plan& plan, ConstTensorView grad_rows, TensorView grad_x);

  /// Backward of combine, for callers that run their own experts.
  [[nodiscard]] CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                       ConstTensorView y);
  /// The result may be ignored if the caller provided both outputs.
  CombineBackwardResult combine_backward(const Plan& plan, const CombineBackwardArgs& args);

  /// Returns one value per row to its route: rows [R] -> routes [T, K]; 0 in slots without a kept
  /// route. For example, the gradients of weights that the experts applied. The second form writes
  /// to `routes` and returns it.
  [[nodiscard]] OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows);
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes);

  /// Memory for the experts' result (or gradient) rows [R, D] of this plan, which combine (or
  /// dispatch_backward) can read without a copy.
  [[nodiscard]] OwnedTensor allocate_rows(const Plan& plan, DType dtype);

 private:
  friend class DeviceCounts;
  /// Returns the sums over all ranks of int64 values on a GPU, such as a layer's counts. The shape
  /// must be identical on every rank. Agrees and runs ahead as a plan does. Collective.
  OwnedTensor all_reduce(const ConstTensorView& values);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace crossdock
