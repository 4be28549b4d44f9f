#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

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
  /// An ncclComm_t with the group's ranks: alltoall and allgather exchange all rows through it,
  /// direct and hierarchical those between nodes. Without it ranks copy from each other's memory.
  /// Must be set before the first plan, and must not change afterwards.
  void* nccl_comm = nullptr;
};

struct DispatchResult;

/// Rows of a dispatch that have arrived: those of the local experts [first_expert, last_expert).
struct DispatchChunk {
  int64_t first_expert = 0;
  int64_t last_expert = 0;
};

/// Inputs and optional outputs of a dispatch. Outputs that are not given are allocated by the
/// library and owned by the `DispatchResult`.
struct DispatchArgs {
  ConstTensorView x{};       // [T, D]; fp64, fp32, bf16, fp16 or fp8 e4m3
  ConstTensorView scales{};  // [T, ceil(D/128)] fp32 or [T, ceil(D/32)] e8m0, with fp8 only
  TensorView rows{};         // out, optional: [R, D]
  TensorView row_scales{};   // out, optional
  bool with_row_weights = false;

  /// Rows arrive in at most this many chunks of whole local experts, so that a rank can compute
  /// with the first chunk while the others are on their way. At least 1, identical on every rank;
  /// never more chunks than the largest number of local experts of any rank; always 1 on a GPU.
  int64_t num_chunks = 1;
  /// Called after each chunk, in the order of the experts, on the calling thread, equally often on
  /// every rank: set it on all ranks or on none. The result is the one that dispatch returns; its
  /// row weights are complete, and so are the rows of the chunks so far. Peers wait meanwhile: hand
  /// work to another thread, which must not use the group. An exception, also one after the last
  /// chunk, fails the dispatch on all ranks.
  std::function<void(const DispatchResult&, const DispatchChunk&)> on_chunk{};
};

struct DispatchResult {
  OwnedTensor rows;         // [R, D], grouped by local expert; pad rows are zero
  OwnedTensor row_scales;   // [R, ...] with fp8
  OwnedTensor row_weights;  // [R] if asked for; 0 in pad rows
};

struct CombineBackwardResult {
  OwnedTensor grad_rows;     // [R, D] = weight * grad_out of the row's token; 0 in pad rows
  OwnedTensor grad_weights;  // [T, K] = <y row, grad_out>; 0 where there is no kept route
};

/// A call that has begun; see Dispatcher::begin_dispatch. Pass it to Dispatcher::finish.
template <typename Result>
class [[nodiscard]] Pending {
 public:
  Pending() = default;

 private:
  friend class Dispatcher;

  Result result_{};
  std::shared_ptr<const void> done_;  // what finish waits for; null: the call is done
  Plan plan_;                         // in use until then
};

/// Carries tokens to the ranks that own their experts, and the results back, forward and backward.
///
/// Members that make plans or move rows are collective: all ranks of the group call them in the
/// same order, whatever they hold; finish, check, allocate_rows and the accessors are not. An
/// invalid input on any rank is the same error on all ranks, and no row has moved. The group must
/// outlive the dispatcher. Several dispatchers may share a group. An output must not overlap an
/// input or another output. A dispatcher is used by one thread at a time.
///
/// A wrong configuration or an unknown strategy does not throw at construction, as that would leave
/// the other ranks waiting: the first plan() throws, on all ranks. A plan belongs to the dispatcher
/// that made it.
///
/// Tensors may be on a GPU: first the routing's, then those of all calls with its plan. The ranks
/// agree on the host, work is queued in the stream of set_device_options, and no call waits for
/// the GPU, except plan() where the configuration has no max_rows or the plan must be made on the
/// host (a dense routing, drops by weight, alltoall, allgather). A wrong routing is then found by
/// the GPU: the plan is empty, outputs are zero, and the next call or check() throws, on all ranks.
/// Results must be released before their stream is destroyed. Calls may be captured into a CUDA
/// graph: the plan and all results must then live as long as the graph.
class CROSSDOCK_API Dispatcher {
 public:
  Dispatcher(Group& group, DispatchConfig config, std::unique_ptr<Strategy> strategy);
  /// The name of a candidate, or "auto": the candidate with the least cost for this configuration
  /// and these nodes (planner.hpp); strategy().name() tells which. Where "auto" chooses, candidates
  /// must be identical on every rank.
  Dispatcher(Group& group, DispatchConfig config, std::string_view strategy_name,
             const StrategyList& candidates = built_in_strategies());
  ~Dispatcher();
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  const DispatchConfig& config() const;
  Group& group();
  /// Throws if the name given was unknown.
  const Strategy& strategy() const;

  /// For later calls with tensors on a GPU. A new stream waits for the dispatcher's work in the
  /// previous one, which must still exist.
  void set_device_options(const DeviceOptions& options);
  /// Throws what failed the group, or what a GPU has reported since the last call, if anything.
  /// Does not wait for the GPU.
  void check();

  /// Agrees on who receives how many rows, and on the final row of every route.
  [[nodiscard]] Plan plan(const Routing& routing);
  [[nodiscard]] Plan plan(const DenseRouting& routing);

  /// x [T, D] -> rows [R, D]. The result may be ignored if the outputs were given.
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args);

  /// y [R, D] -> out [T, D]: the sum over each token's routes, weighted by the plan's weights.
  /// Tokens without routes get zeros. An `out` that is given is filled and returned.
  [[nodiscard]] OwnedTensor combine(const Plan& plan, ConstTensorView y);
  OwnedTensor combine(const Plan& plan, ConstTensorView y, TensorView out);

  /// dispatch and combine in two halves, so that computation overlaps. On a GPU, begin queues the
  /// call in a stream of its own: it waits for the work that the stream of set_device_options holds
  /// now, and runs beside what is queued there until finish, which makes that stream wait for the
  /// result. Inputs and outputs must not be used in between. Collective like any call; several may
  /// be pending, with other calls between them. On the CPU the call is done when begin returns.
  [[nodiscard]] Pending<DispatchResult> begin_dispatch(const Plan& plan, const DispatchArgs& args);
  [[nodiscard]] Pending<OwnedTensor> begin_combine(const Plan& plan, ConstTensorView y,
                                                   TensorView out = {});
  /// The host does not wait.
  DispatchResult finish(Pending<DispatchResult> pending);
  OwnedTensor finish(Pending<OwnedTensor> pending);

  /// As combine with all weights 1 (for experts that applied the weights themselves).
  [[nodiscard]] OwnedTensor combine_unweighted(const Plan& plan, ConstTensorView y);
  OwnedTensor combine_unweighted(const Plan& plan, ConstTensorView y, TensorView out);

  /// Backward of dispatch: grad_rows [R, D] -> grad_x [T, D]. The same as combine_unweighted.
  [[nodiscard]] OwnedTensor dispatch_backward(const Plan& plan, ConstTensorView grad_rows);
  OwnedTensor dispatch_backward(const Plan& plan, ConstTensorView grad_rows, TensorView grad_x);

  /// Backward of combine, for callers with experts of their own.
  [[nodiscard]] CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                       ConstTensorView y);

  /// One number per row -> one per route: rows [R] -> routes [T, K], 0 where there is no kept
  /// route. For example the gradients of weights that experts applied themselves.
  [[nodiscard]] OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows);

  /// Memory for the experts' result (or gradient) rows [R, D] of this plan, from which combine
  /// (or dispatch_backward) starts without a copy.
  [[nodiscard]] OwnedTensor allocate_rows(const Plan& plan, DType dtype);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace crossdock
