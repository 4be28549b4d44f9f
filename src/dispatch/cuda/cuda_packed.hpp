#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/cuda_path.hpp"
#include "dispatch/cuda/exchange_plan.hpp"
#include "dispatch/cuda/row_transport.hpp"

namespace crossdock::cuda {

/// A plan's arrays, and what its exchanges need.
class PackedPlan final : public CudaPlan {
 public:
  PackedPlan(CudaRank& rank, const PlanData& data, std::span<const int64_t> arrival_tokens)
      : CudaPlan(rank.pool(), rank.plan_inputs(data.T), data),
        exchange_(
            make_exchange_plan(rank.pool(), data, arrival_tokens, rank.stream(), rank.watch())) {}

  const ExchangePlan& exchange() const { return exchange_; }

  void set_relay(RelayPlan relay) { relay_ = std::move(relay); }
  /// Null where tokens are not relayed.
  const RelayPlan* relay() const { return relay_ ? &*relay_ : nullptr; }

 private:
  ExchangePlan exchange_;
  std::optional<RelayPlan> relay_;
};

/// What a strategy exchanges. Default: one row per route, as alltoall does. At most one is set.
struct Packing {
  /// All tokens go to every rank, as with allgather. Returns [received] the token of every arrival,
  /// as its source counts. Collective.
  std::function<std::vector<int64_t>(const Exchange& exchange)> arrival_tokens{};
  /// Only copies that cross between nodes are exchanged, as with direct; within a node rows are
  /// written and read where they lie. Collective.
  std::function<RelayPlan(CudaRank& rank, const Plan& host_plan)> relay{};
};

/// Rows are packed by destination, exchanged by a transport and unpacked. The plan is made on the
/// host, so that its sizes are known there.
class CudaPacked final : public CudaPath {
 public:
  /// Exchanges through context.options.nccl_comm if given, else through peers' memory.
  CudaPacked(const PathContext& context, int device, const Packing& packing);

  /// Exchanges through a transport that waits for its peers itself, as NCCL does.
  using MakeTransport = std::function<std::unique_ptr<RowTransport>(CudaRank& rank)>;
  CudaPacked(const PathContext& context, int device, const Packing& packing,
             const MakeTransport& make_transport);

 private:
  CudaPacked(const PathContext& context, int device, const Packing& packing, Waits waits,
             const MakeTransport& make_transport);

  /// Rows that are exchanged together: from[from_index[i]] is packed as the i-th, and the i-th
  /// arrival, taken from among the arrivals by arrival_index, becomes to[to_index[i]]. A null index
  /// counts up.
  struct RowBatch {
    const RowTraffic* traffic = nullptr;
    const std::byte* from = nullptr;
    const int64_t* from_index = nullptr;
    bool is_packed = true;  // false: `from` itself is sent
    std::byte* to = nullptr;
    const int64_t* to_index = nullptr;
    const int64_t* arrival_index = nullptr;
    int64_t num_unpacked = 0;  // rows that go to `to`
    int64_t row_bytes = 0;
    OwnedTensor packed{};   // [num_sent, row_bytes]
    OwnedTensor arrived{};  // [num_received, row_bytes]
    ShownMemory shown{};
    size_t entry = 0;  // of `shown` among the handles

    // For tokens that are relayed, and rows that are read where they lie.
    const RelayPlan* relay = nullptr;
    bool is_read = false;        // the rows are; otherwise tokens go there
    int64_t num_tokens = 0;      // at `from`
    const void* rows = nullptr;  // that ranks of this node use
    int64_t rows_bytes = 0;
    ShownMemory shown_rows{};
    size_t rows_entry = 0;
  };

  std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan) override;
  ReadyCall ready_dispatch(const Plan& plan, const DispatchArgs& args,
                           const DispatchResult& result) override;
  ReadyCall ready_gather_sum(const char* operation, const Plan& plan,
                             const GatherSumArgs& args) override;
  ReadyCall ready_combine_backward(const Plan& plan, const GradientTensors& tensors) override;
  ReadyCall ready_collect_routes(const Plan& plan, const ConstTensorView& rows,
                                 const TensorView& routes) override;

  // What a plan exchanges.
  RowBatch tokens_to_rows(const Plan& plan, const ConstTensorView& tokens,
                          const TensorView& rows) const;
  RowBatch routes_to_rows(const Plan& plan, const ConstTensorView& routes,
                          const TensorView& rows) const;
  RowBatch rows_to_tokens(const Plan& plan, const ConstTensorView& rows) const;

  /// A call that exchanges these batches: takes their memory, numbers their handles. `queue` gets
  /// them when the ranks have agreed.
  using QueueBatches =
      std::function<void(const CudaRank::Agreed& agreed, std::span<const RowBatch> batches)>;
  ReadyCall ready_batches(std::vector<RowBatch> batches, QueueBatches queue);
  void take_memory(RowBatch& batch);

  /// Packs, exchanges and unpacks batches whose handles are neighbours.
  void exchange(const CudaRank::Agreed& agreed, Operation operation,
                std::span<const RowBatch> batches);
  void scatter_near(const CudaRank::Agreed& agreed, Operation operation, const RowBatch& batch);
  /// Zeroes the pad rows where a batch arrives.
  void zero_pads(const Plan& plan, const RowBatch& batch) const;
  void sum(const CudaRank::Agreed& agreed, const RowBatch& batch, GatherSumKernelArgs& args);
  void unpack_routes(const Plan& plan, const RowBatch& batch, const TensorView& routes);

  /// What gradients are made of where the rows are.
  struct GradientRows {
    OwnedTensor grad_out;      // [R, D]
    OwnedTensor weights;       // [R]
    OwnedTensor grad_weights;  // [R]
  };
  void make_gradients(const Plan& plan, const GradientTensors& tensors,
                      const GradientRows& rows) const;

  Packing packing_;
  std::unique_ptr<RowTransport> transport_;
};

}  // namespace crossdock::cuda
