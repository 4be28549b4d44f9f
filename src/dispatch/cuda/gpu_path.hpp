#pragma once

#include <memory>
#include <span>
#include <vector>

#include "dispatch/cuda/gpu_call.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/path.hpp"

namespace crossdock::cuda {

/// What the GPU paths have in common: the rank, and members that do not depend on how rows travel.
class GpuPath : public Path {
 public:
  void agree_on(const Proposal& proposal) final;
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) final;
  std::vector<std::shared_ptr<const void>> owners_of(
      std::span<const ConstTensorView> tensors) const final;
  void finish(const std::shared_ptr<const void>& done) final { rank_.streams().finish(done); }
  void set_options(const DeviceOptions& options) final { rank_.set_options(options); }
  void check() final { rank_.check(); }
  void await() final { rank_.watch().await(rank_.stream()); }

 protected:
  GpuPath(const PathContext& context, int device, const ChannelUse& use)
      : context_(context), rank_(context_, device, use) {}

  Group& group() const { return context_.group; }
  const DispatchConfig& config() const { return *context_.config; }

  PathContext context_;
  CudaRank rank_;
};

/// Checks the arguments of a dispatch on a GPU.
void check_dispatch(const CudaRank& rank, const Plan& plan, const DispatchArgs& args,
                    const Begun* begun);

/// Calls on_chunk, if given, with all rows of a dispatch. They may not have moved yet: on_chunk can
/// queue work behind the call.
void call_on_chunk(Group& group, const Plan& plan, const DispatchArgs& args,
                   const DispatchResult& result);

/// Kernel arguments that do not depend on where the rows are.
GatherSumKernelArgs sum_args(const char* operation, const Plan& plan, const GatherSumArgs& args,
                             const TensorView& out);

}  // namespace crossdock::cuda
