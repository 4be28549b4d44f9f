#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/cuda_path.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "dispatch/strategies/direct/device_routing.hpp"

namespace crossdock::cuda {

/// `direct` within a node (and `hierarchical`, which is the same there): plan, scatter, gather_sum.
/// The ranks agree on a call and tell each other where their rows are, on the host or, if hosts run
/// ahead, in kernels (RankAgreement). The kernels of a call wait for each other on the GPU.
class CudaDirect final : public CudaPath {
 public:
  /// sums_per_rank: partial sums are made per rank, otherwise for all ranks together.
  CudaDirect(const PathContext& context, int device, bool sums_per_rank);

  /// Make the plan on the GPU if possible.
  Plan plan(const Routing& routing) override;
  Plan plan(const DenseRouting& routing) override;

 private:
  std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan) override;
  OwnedTensor take_dispatch_rows(const Plan& plan, DType dtype) override;
  ReadyCall ready_dispatch(const Plan& plan, const DispatchArgs& args,
                           const DispatchResult& result) override;
  ReadyCall ready_gather_sum(const char* operation, const Plan& plan,
                             const GatherSumArgs& args) override;
  ReadyCall ready_combine_backward(const Plan& plan, const GradientTensors& tensors) override;
  ReadyCall ready_collect_routes(const Plan& plan, const ConstTensorView& rows,
                                 const TensorView& routes) override;

  /// A tensor of rows that peers write.
  struct Landing {
    ExposedMemory shown;
    int64_t row_bytes = 0;
  };

  /// The rows of a dispatch.
  struct Landings {
    std::vector<Landing> parts;  // rows, then scales and row weights if the call sends them
    bool are_joined = false;     // one copy of a token arrives per rank
    TensorView row_weights{};    // to be set here, if rows are joined and weights requested
  };

  bool plans_on_device() const;
  /// Whether plans have links.
  bool has_links() const { return sums_per_rank_ || sends_per_rank_; }
  /// Plans a routing with K slots per token.
  Plan plan_on_device(int64_t K, const std::function<ReadyRouting()>& make_routing);
  Plan link(Plan plan);
  void queue_scatter(const CudaRank::Agreed& agreed, const Plan& plan, const DispatchArgs& args,
                     const Landings& landings);
  /// Queues the scatter of a begun dispatch, chunk by chunk.
  void queue_chunks(const CudaRank::Agreed& agreed, const Plan& plan, int64_t most_chunks,
                    const ScatterArgs& scatter, const Landings& landings);
  void complete(const Plan& plan, const Landings& landings);

  ReadyCall ready_partial_sums(const char* operation, const Plan& plan, const GatherSumArgs& args);
  /// Sums the rows of entry 0 of all ranks.
  void queue_gather(const CudaRank::Agreed& agreed, GatherSumKernelArgs& gather, int64_t own_bytes);

  bool sums_per_rank_;          // partial sums
  bool sends_per_rank_;         // one copy of a token to each rank
  bool rows_are_free_ = false;  // the last rows taken: peers may write them once they have the plan
  // From the last dispatch; the next is likely to be the same.
  DType row_dtype_ = DType::kBF16;
  bool reserves_rows_ = true;
};

}  // namespace crossdock::cuda
