#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/exchange_plan.hpp"
#include "dispatch/cuda/row_transport.hpp"

namespace crossdock::cuda {

/// A plan's arrays, and what its exchanges need.
class StagedArrays final : public CudaPlan {
 public:
  StagedArrays(CudaRank& rank, const PlanData& data, std::span<const int64_t> arrival_tokens)
      : CudaPlan(rank.pool(), rank.plan_inputs(data.T), data),
        exchange_(rank.pool(), data, arrival_tokens, rank.stream()) {}

  const ExchangePlan& exchange() const { return exchange_; }

 private:
  ExchangePlan exchange_;
};

/// `alltoall` and `allgather` on GPUs. The plan is made on the host, so that its sizes are known
/// there; rows are packed, exchanged by a transport and regrouped.
class CudaStaged final : public DevicePath {
 public:
  /// nccl_comm: null, or an ncclComm_t to exchange through instead of peers' memory.
  CudaStaged(DevicePathContext context, int device, void* nccl_comm);

  void set_options(const DeviceOptions& options) override { rank_.set_options(options); }
  Plan plan(const Routing& routing, const PlanOnHost& plan_on_host) override;
  Plan plan(const DenseRouting& routing, const PlanDenseOnHost& plan_on_host) override;
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args) override;
  OwnedTensor sum_rows(const char* operation, const Plan& plan, const GatherSumArgs& args) override;
  CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                         ConstTensorView y) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows) override;
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) override;
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
  };

  std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan);
  Journey tokens_to_rows(const Plan& plan, const ConstTensorView& tokens, const TensorView& rows);
  Journey routes_to_rows(const Plan& plan, const ConstTensorView& routes, const TensorView& rows);
  Journey rows_home(const Plan& plan, const ConstTensorView& rows);
  void prepare(Journey& journey);
  static const ExchangePlan& exchange_of(const Plan& plan) {
    return static_cast<const StagedArrays&>(*plan.device_data()).exchange();
  }
  CudaRank::Met meet(const char* operation, const Plan& plan, std::string call_text,
                     std::span<const Journey> journeys, std::optional<Error> refusal);
  /// Journeys of a meeting, from its entry `first_entry` on.
  void travel(const CudaRank::Met& met, std::span<const Journey> journeys, size_t first_entry = 0);
  void bring_home(const Plan& plan, const Journey& journey, const TensorView& routes);

  CudaRank rank_;
  std::unique_ptr<RowTransport> transport_;
  bool gathers_tokens_;  // allgather
};

}  // namespace crossdock::cuda
