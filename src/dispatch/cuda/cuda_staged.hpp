#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/exchange_plan.hpp"
#include "dispatch/cuda/pull_sum.hpp"
#include "dispatch/cuda/relay_plan.hpp"
#include "dispatch/cuda/row_transport.hpp"

namespace crossdock::cuda {

/// A plan's arrays, and what its exchanges need.
class StagedArrays final : public CudaPlan {
 public:
  StagedArrays(CudaRank& rank, const PlanData& data, std::span<const int64_t> arrival_tokens)
      : CudaPlan(rank.pool(), rank.plan_inputs(data.T), data),
        exchange_(rank.pool(), data, arrival_tokens, rank.stream()) {}

  const ExchangePlan& exchange() const { return exchange_; }

  void set_relay(std::unique_ptr<const RelayPlan> relay) { relay_ = std::move(relay); }
  /// Null where tokens are not relayed.
  const RelayPlan* relay() const { return relay_.get(); }

 private:
  ExchangePlan exchange_;
  std::unique_ptr<const RelayPlan> relay_;
};

/// `alltoall` and `allgather` on GPUs, and `direct` and `hierarchical` between nodes. The plan is
/// made on the host, so that its sizes are known there; rows are packed, exchanged by a transport
/// and regrouped. The latter two exchange only what crosses between nodes: inside a node they write
/// and read rows where they lie.
class CudaStaged final : public DevicePath {
 public:
  /// nccl_comm: null, or an ncclComm_t to exchange through instead of peers' memory.
  CudaStaged(const DevicePathContext& context, int device, void* nccl_comm);

  void set_options(const DeviceOptions& options) override { rank_.set_options(options); }
  Plan plan(const Routing& routing, const PlanOnHost& plan_on_host) override;
  Plan plan(const DenseRouting& routing, const PlanDenseOnHost& plan_on_host) override;
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args) override;
  OwnedTensor sum_rows(const char* operation, const Plan& plan, const GatherSumArgs& args) override;
  CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                         ConstTensorView y) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows) override;
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) override;
  void begin_aside() override { rank_.begin_aside(); }
  std::shared_ptr<const void> end_aside() override { return rank_.end_aside(); }
  void finish(const std::shared_ptr<const void>& done) override { rank_.finish(done); }
  void check() override { rank_.raise_faults(); }

 private:
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
    Buffer send;     // packed, or what stands in for `from`
    Buffer arrived;  // [num_received, row_bytes]
    ShownMemory shown;
    size_t entry = 0;  // of `shown` in the meeting

    // Of tokens that are relayed, and rows that are read where they lie.
    const RelayPlan* relay = nullptr;
    bool is_read = false;        // the rows are; otherwise tokens go there
    int64_t num_tokens = 0;      // at `from`
    const void* rows = nullptr;  // that peers of this node use
    int64_t rows_bytes = 0;
    ShownMemory shown_rows;
    size_t rows_entry = 0;
  };

  std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan);
  Journey tokens_to_rows(const Plan& plan, const ConstTensorView& tokens, const TensorView& rows);
  Journey routes_to_rows(const Plan& plan, const ConstTensorView& routes, const TensorView& rows);
  Journey rows_home(const Plan& plan, const ConstTensorView& rows);
  void prepare(Journey& journey);
  static const ExchangePlan& exchange_of(const Plan& plan) {
    return static_cast<const StagedArrays&>(*plan.device_data()).exchange();
  }
  static const RelayPlan* relay_of(const Plan& plan) {
    return static_cast<const StagedArrays&>(*plan.device_data()).relay();
  }
  CudaRank::Met meet(const char* operation, const Plan& plan, std::string call_text,
                     std::span<Journey> journeys, std::optional<Error> refusal);
  /// Journeys of a meeting that follow each other.
  void travel(const CudaRank::Met& met, std::span<const Journey> journeys);
  void forward(const CudaRank::Met& met, const Journey& journey);
  void zero_pads(const Plan& plan, const TensorView& rows, const Journey& journey) const;
  void sum(const CudaRank::Met& met, const Journey& journey, PullSumArgs& args);
  void bring_home(const Plan& plan, const Journey& journey, const TensorView& routes);

  CudaRank rank_;
  std::unique_ptr<RowTransport> transport_;
  bool gathers_tokens_;  // allgather
  bool relays_tokens_;   // direct, hierarchical
};

}  // namespace crossdock::cuda
