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
#include "dispatch/cuda/partial_sum_plan.hpp"
#include "dispatch/cuda/row_transport.hpp"

namespace crossdock::cuda {

/// A plan's arrays, and the data of its exchanges.
class PackedPlan final : public CudaPlan {
 public:
  PackedPlan(CudaRank& rank, const PlanData& data, std::span<const int64_t> arrival_tokens)
      : CudaPlan(rank.pool(), rank.plan_inputs(data.T, data.K), data),
        exchange_(
            make_exchange_plan(rank.pool(), data, arrival_tokens, rank.stream(), rank.watch())) {}

  const ExchangePlan& exchange() const { return exchange_; }

  void set_relay(RelayPlan relay) { relay_ = std::move(relay); }
  /// Null if tokens are not relayed.
  const RelayPlan* relay() const { return relay_ ? &*relay_ : nullptr; }

  void set_partial_sums(PartialSumPlan sums) { partial_sums_ = std::move(sums); }
  /// REQUIRES: set.
  const PartialSumPlan& partial_sums() const { return *partial_sums_; }

 private:
  ExchangePlan exchange_;
  std::optional<RelayPlan> relay_;
  std::optional<PartialSumPlan> partial_sums_;
};

/// The rows that a strategy exchanges. Default: one per route, as in alltoall. At most one of the
/// first two is set.
struct Packing {
  /// All tokens go to every rank, as with allgather. Returns [received] the token of every arrival,
  /// numbered as on its source.
  std::function<std::span<const int64_t>(const Plan& host_plan)> arrival_tokens{};
  /// Only copies between nodes are exchanged, as with direct; within a node rows are written and
  /// read in place. Collective.
  std::function<RelayPlan(CudaRank& rank, const Plan& host_plan)> relay{};
  /// Which rows are summed where, with partial sums.
  std::function<PartialSumLists(const CudaRank& rank, const Plan& host_plan)> sum_lists{};
};

/// Packs rows by destination, exchanges them through a transport and unpacks them. Makes plans on
/// the host, where the sizes of exchanges are needed.
class CudaPacked final : public CudaPath {
 public:
  /// Exchanges through context.options.nccl_comm if given, else through peers' memory. If that is
  /// unreachable: between processes on several nodes through the library's own NCCL communicator,
  /// otherwise through host memory. REQUIRES: no relay, or GPUs of a node reach each other's
  /// memory.
  CudaPacked(const PathContext& context, int device, const Packing& packing);

  /// Exchanges through a transport that waits for its peers itself, as NCCL does.
  using MakeTransport = std::function<std::unique_ptr<RowTransport>(CudaRank& rank)>;
  CudaPacked(const PathContext& context, int device, const Packing& packing,
             const MakeTransport& make_transport);

 private:
  CudaPacked(const PathContext& context, int device, const Packing& packing, Waits waits,
             const MakeTransport& make_transport);

  /// Rows that are exchanged together: packed[i] = from[from_index[i]] before the exchange, and
  /// to[to_index[i]] = arrived[arrival_index[i]] after it. A null index means i.
  struct RowBatch {
    const RowTraffic* traffic = nullptr;
    const std::byte* from = nullptr;
    const int64_t* from_index = nullptr;
    bool is_packed = true;  // false: `from` itself is sent
    std::byte* to = nullptr;
    const int64_t* to_index = nullptr;
    const int64_t* arrival_index = nullptr;
    int64_t num_unpacked = 0;  // rows written to `to`
    int64_t row_bytes = 0;
    OwnedTensor packed{};   // [num_sent, row_bytes]
    OwnedTensor arrived{};  // [num_received, row_bytes]
    ExposedMemory shown{};
    size_t entry = 0;  // index of `shown` among the handles

    // For relayed tokens, and for rows that are read in place.
    const RelayPlan* relay = nullptr;
    bool is_read = false;        // rows are read; otherwise tokens are written there
    int64_t num_tokens = 0;      // at `from`
    const void* rows = nullptr;  // used by the ranks of this node
    int64_t rows_bytes = 0;
    ExposedMemory shown_rows{};
    size_t rows_entry = 0;
  };

  bool runs_aside() const override;
  void connect() override { transport_->connect(); }
  std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan) override;
  ReadyCall ready_dispatch(const Plan& plan, const DispatchArgs& args,
                           const DispatchResult& result) override;
  ReadyCall ready_gather_sum(const char* operation, const Plan& plan,
                             const GatherSumArgs& args) override;
  ReadyCall ready_partial_sums(const char* operation, const Plan& plan, const GatherSumArgs& args);
  ReadyCall ready_combine_backward(const Plan& plan, const GradientTensors& tensors) override;
  ReadyCall ready_collect_routes(const Plan& plan, const ConstTensorView& rows,
                                 const TensorView& routes) override;

  // The batches of a plan.
  RowBatch tokens_to_rows(const Plan& plan, const ConstTensorView& tokens,
                          const TensorView& rows) const;
  RowBatch routes_to_rows(const Plan& plan, const ConstTensorView& routes,
                          const TensorView& rows) const;
  RowBatch rows_to_tokens(const Plan& plan, const ConstTensorView& rows) const;
  RowBatch partial_sums_to_tokens(const Plan& plan, const ConstTensorView& rows) const;

  /// Makes a call that exchanges these batches: takes their memory and numbers their handles. Once
  /// the ranks have agreed, `queue` is called with the batches.
  using QueueBatches =
      std::function<void(const CudaRank::Agreed& agreed, std::span<const RowBatch> batches)>;
  ReadyCall ready_batches(std::vector<RowBatch> batches, QueueBatches queue);
  void take_memory(RowBatch& batch);

  /// Packs, exchanges and unpacks batches with contiguous handles.
  void exchange(const CudaRank::Agreed& agreed, Operation operation,
                std::span<const RowBatch> batches);
  /// Exchanges packed batches.
  void transfer(const CudaRank::Agreed& agreed, Operation operation,
                std::span<const RowBatch> batches);
  void scatter_near(const CudaRank::Agreed& agreed, Operation operation, const RowBatch& batch);
  /// Zeroes the pad rows of a batch's destination.
  void zero_pads(const Plan& plan, const RowBatch& batch) const;
  void sum(const CudaRank::Agreed& agreed, const RowBatch& batch, GatherSumKernelArgs& args);
  /// Makes partial sums, exchanges them and adds them up.
  void sum_partials(const CudaRank::Agreed& agreed, const RowBatch& batch, const Plan& plan,
                    SumGroupsArgs& args);
  void unpack_routes(const Plan& plan, const RowBatch& batch, const TensorView& routes);

  /// Inputs and results of combine_backward, one entry per row.
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
