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
#include "dispatch/strategies/direct/relay_plan.hpp"

namespace crossdock::cuda {

/// A plan's arrays, and what its exchanges need.
class StagedArrays final : public CudaPlan {
 public:
  StagedArrays(CudaRank& rank, const PlanData& data, std::span<const int64_t> arrival_tokens)
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

/// REQUIRES: a CudaStaged made the plan.
inline const StagedArrays& staged_plan(const Plan& plan) {
  return static_cast<const StagedArrays&>(*plan.device_data());
}

/// `alltoall` and `allgather` on GPUs, and `direct` and `hierarchical` between nodes. The plan is
/// made on the host, so that its sizes are known there; rows are packed, exchanged by a transport
/// and regrouped. The latter two exchange only what crosses between nodes: inside a node they write
/// and read rows where they lie.
class CudaStaged final : public CudaPath {
 public:
  /// nccl_comm: null, or an ncclComm_t to exchange through instead of peers' memory.
  CudaStaged(const DevicePathContext& context, int device, void* nccl_comm);

  /// Exchanges through a transport that waits for its peers itself, as NCCL does.
  using MakeTransport = std::function<std::unique_ptr<RowTransport>(CudaRank& rank)>;
  CudaStaged(const DevicePathContext& context, int device, const MakeTransport& make_transport);

 private:
  CudaStaged(const DevicePathContext& context, int device, Waits waits,
             const MakeTransport& make_transport);

  /// Something that travels: from[from_index[i]] is packed as the i-th, and the i-th arrival
  /// becomes to[to_index[i]], taken from among the arrivals by arrival_index. Null indices count
  /// up.
  struct Journey {
    const RowTraffic* traffic = nullptr;
    const std::byte* from = nullptr;
    const int64_t* from_index = nullptr;
    bool is_packed = true;  // false: `from` itself is sent
    std::byte* to = nullptr;
    const int64_t* to_index = nullptr;
    const int64_t* arrival_index = nullptr;
    int64_t num_landing = 0;  // rows that go to `to`
    int64_t row_bytes = 0;
    OwnedTensor packed{};   // [num_sent, row_bytes]
    OwnedTensor arrived{};  // [num_received, row_bytes]
    ShownMemory shown{};
    size_t entry = 0;  // of `shown` in the meeting

    // Of tokens that are relayed, and rows that are read where they lie.
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
  ReadyCall ready_sum(Operation operation, const Plan& plan, const GatherSumArgs& args) override;
  ReadyCall ready_gradients(const Plan& plan, const GradientTensors& tensors) override;
  ReadyCall ready_routes(const Plan& plan, const ConstTensorView& rows,
                         const TensorView& routes) override;

  // The journeys of a plan.
  Journey tokens_to_rows(const Plan& plan, const ConstTensorView& tokens,
                         const TensorView& rows) const;
  Journey routes_to_rows(const Plan& plan, const ConstTensorView& routes,
                         const TensorView& rows) const;
  Journey rows_home(const Plan& plan, const ConstTensorView& rows) const;

  /// A call of these journeys: takes their memory, numbers their handles. `queue` gets the journeys
  /// and the meeting.
  using QueueJourneys =
      std::function<void(const CudaRank::Met& met, std::span<const Journey> journeys)>;
  ReadyCall ready(std::vector<Journey> journeys, QueueJourneys queue);
  void prepare(Journey& journey);

  /// Journeys of a meeting that follow each other.
  void travel(const CudaRank::Met& met, Operation operation, std::span<const Journey> journeys);
  void forward(const CudaRank::Met& met, Operation operation, const Journey& journey);
  /// Zeroes the pad rows where a journey's rows land.
  void zero_pads(const Plan& plan, const Journey& journey) const;
  void sum(const CudaRank::Met& met, const Journey& journey, PullSumArgs& args);
  void bring_home(const Plan& plan, const Journey& journey, const TensorView& routes);

  /// What gradients are made of where the rows are.
  struct GradientRows {
    OwnedTensor grad_out;      // [R, D]
    OwnedTensor weights;       // [R]
    OwnedTensor grad_weights;  // [R]
  };
  void make_gradients(const Plan& plan, const GradientTensors& tensors,
                      const GradientRows& rows) const;

  std::unique_ptr<RowTransport> transport_;
  bool gathers_tokens_;  // allgather
  bool relays_tokens_;   // direct, hierarchical
};

}  // namespace crossdock::cuda
