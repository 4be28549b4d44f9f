#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "crossdock/extend/strategy.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

struct LocalRoutes;  // one rank's routing, checked; internal
class DevicePath;    // the same calls for tensors on a device; internal

/// How a dispatcher works on a device. Ranks need not have it alike.
struct DeviceOptions {
  /// All work goes there, in order. Default: the device's default stream; for ranks that are
  /// threads of one process the calling thread's own (cudaStreamPerThread; see docs/gpu.md).
  Stream stream{};
  /// Multiprocessors that a call uses at most; 0: all. Where those of all ranks of this process fit
  /// on their GPU together (in more streams than one per rank, on three quarters of it), calls are
  /// one kernel instead of two, which waits for its peers with all its blocks.
  int max_sms = 0;
  /// An ncclComm_t with the group's ranks: alltoall and allgather then exchange through it, direct
  /// and hierarchical what goes between nodes. Without it ranks copy from each other's memory.
  /// Given before the first plan.
  void* nccl_comm = nullptr;
};

struct DispatchResult;

/// Rows of a dispatch that have landed: those of the local experts [first_expert, last_expert).
struct DispatchChunk {
  int64_t first_expert = 0;
  int64_t last_expert = 0;
};

/// What the caller may give and get of a dispatch. Views that are not given are made by the
/// library (and then owned by `DispatchResult`).
struct DispatchArgs {
  ConstTensorView x{};       // [T, D]; fp64, fp32, bf16, fp16 or fp8 e4m3
  ConstTensorView scales{};  // [T, ceil(D/128)] fp32 or [T, ceil(D/32)] e8m0, with fp8 only
  TensorView rows{};         // out, optional: [R, D]
  TensorView row_scales{};   // out, optional
  bool with_row_weights = false;

  /// Rows land in up to this many chunks of whole local experts, so that a rank can compute with
  /// the first while the others travel. At least 1, alike on all ranks. Not more than the experts
  /// of the rank that has most; one on a device, where the stream has the order.
  int64_t num_chunks = 1;
  /// Called after each chunk, in the order of the experts, on the thread of the dispatch, equally
  /// often on every rank: given on all ranks or on none. The result is the one that dispatch
  /// returns, with all row weights and these rows filled. Peers wait meanwhile: hand work to
  /// another thread, which must not use the group. An exception, also after the last chunk, fails
  /// the dispatch on all ranks.
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

/// A call that has begun; see Dispatcher::begin_dispatch.
template <typename Result>
struct Pending {
  Result result;                     // not to be used before finish
  std::shared_ptr<const void> done;  // what finish waits for; internal
  Plan plan{};                       // in use until then; internal
};

/// Carries tokens to the ranks that own their experts, and the results back, forward and backward.
///
/// Members that move rows or make plans are collective: all ranks of the group call them in the
/// same order, whatever they hold; finish, check, allocate_rows and the accessors are not. An
/// invalid input on any rank is the same error on all, and nothing moved. The group must outlive
/// the dispatcher. Several dispatchers may share a group. An output must not overlap an input or
/// another output.
///
/// A wrong configuration or an unknown strategy does not throw at construction, as that would leave
/// the other ranks waiting: it is refused at the first plan(), by all ranks alike. A plan belongs
/// to the dispatcher that made it.
///
/// Tensors may be on a GPU: those of a routing, and then those of all calls with its plan. Ranks
/// still meet on the host, but work is only queued in the stream of set_device_options, and
/// nothing waits for the device, except plan() where the configuration has no max_rows or the plan
/// must be made on the host (a dense routing, drops by weight, alltoall, allgather). A wrong
/// routing is then found by the device: the plan is empty, outputs are zero, and the next call or
/// check() throws, on all ranks alike. Results must be released before their stream is destroyed.
/// Calls may be captured into a CUDA graph: the plan and all results must then live as long as the
/// graph.
class Dispatcher {
 public:
  Dispatcher(Group& group, DispatchConfig config, std::unique_ptr<Strategy> strategy);
  /// A name of strategy_names(), or "auto": the one with the least cost for this configuration and
  /// these nodes (strategy_cost.hpp); strategy().name() tells which.
  Dispatcher(Group& group, DispatchConfig config, std::string_view strategy_name);
  ~Dispatcher();
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  const DispatchConfig& config() const { return *config_; }
  Group& group() { return group_; }
  /// Throws if the name given was unknown.
  const Strategy& strategy() const;

  /// For later calls with tensors on a device. A new stream waits for what the dispatcher has in
  /// the one before, which must still be there.
  void set_device_options(const DeviceOptions& options);
  /// Throws what a device has reported since the last call, if anything. Does not wait for it, and
  /// is not collective.
  void check();

  /// Agrees on who receives how many rows, and on the final row of every route.
  Plan plan(const Routing& routing);
  Plan plan(const DenseRouting& routing);

  /// x [T, D] -> rows [R, D].
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args);

  /// y [R, D] -> out [T, D]: the sum over each token's routes, weighted by the plan's weights.
  /// Tokens without routes get zeros.
  OwnedTensor combine(const Plan& plan, ConstTensorView y, TensorView out = {});

  /// The same two in halves, so that computation overlaps: on a GPU, what begins is queued in a
  /// stream of its own. It waits for what the stream of set_device_options holds now, and runs
  /// beside what is queued there until finish, which makes that stream wait for the result. Inputs
  /// and outputs must be left alone in between. Collective like any call; several may be under way,
  /// and other calls between them. On the CPU all is done when begin returns.
  Pending<DispatchResult> begin_dispatch(const Plan& plan, const DispatchArgs& args);
  Pending<OwnedTensor> begin_combine(const Plan& plan, ConstTensorView y, TensorView out = {});
  /// Not collective; the host does not wait.
  DispatchResult finish(Pending<DispatchResult> pending);
  OwnedTensor finish(Pending<OwnedTensor> pending);

  /// As combine with all weights 1 (for experts that applied the weights themselves).
  OwnedTensor combine_unweighted(const Plan& plan, ConstTensorView y, TensorView out = {});

  /// Backward of dispatch: grad_rows [R, D] -> grad_x [T, D]. The same as combine_unweighted.
  OwnedTensor dispatch_backward(const Plan& plan, ConstTensorView grad_rows,
                                TensorView grad_x = {});

  /// Backward of combine, for callers with experts of their own.
  CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                         ConstTensorView y);

  /// One number per row -> one per route: rows [R] -> routes [T, K], 0 where there is no kept
  /// route. Brings home grad_weights that experts computed.
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows);

  /// Memory for the experts' result (or gradient) rows [R, D] of this plan, from where combine
  /// starts without a copy. Not collective.
  OwnedTensor allocate_rows(const Plan& plan, DType dtype);

 private:
  template <typename Result>
  Pending<Result> begin(const char* operation, const Plan& plan,
                        const std::function<Result()>& call);
  template <typename Result>
  Result finish_call(Pending<Result>& pending);
  Plan plan_routes(const std::function<LocalRoutes()>& read_routes);
  void move_out(const Exchange& exchange, std::span<const RowPart> parts, const DispatchArgs& args,
                const DispatchResult& result);
  OwnedTensor sum_rows(const char* operation, const Plan& plan, const GatherSumArgs& args);
  void check_plan(const Plan& plan) const;
  DevicePath& device_path(Device device);
  Device planning_device(const ConstTensorView& routes, const ConstTensorView& weights);
  uint64_t agree(const char* operation, const Plan& plan, std::string call_text,
                 const std::optional<Error>& refusal);

  Group& group_;
  std::shared_ptr<const DispatchConfig> config_;
  std::unique_ptr<Strategy> strategy_;
  std::optional<Error> flaw_;  // what is wrong with the configuration
  std::string config_text_;    // what all ranks must have alike
  DeviceOptions device_options_;
  std::unique_ptr<DevicePath> device_path_;  // made when first needed
};

}  // namespace crossdock
