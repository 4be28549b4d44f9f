#include "dispatch/cuda/gpu_path.hpp"

#include "core/check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/dispatch_args.hpp"

namespace crossdock::cuda {

void GpuPath::agree_on(const Proposal& proposal) {
  GpuCall call(rank_, {.operation = proposal.operation,
                       .plan = nullptr,
                       .text = proposal.config,
                       .subject = proposal.subject});
  call.prepare([&] {
    if (proposal.refusal != nullptr) throw Error(*proposal.refusal);
  });
  const AgreedCall& agreed = call.agree({});
  call.move([&] {
    if (agreed.is_queued()) call.await_peers(operation_of(proposal.operation));
  });
}

OwnedTensor GpuPath::allocate_rows(const Plan& plan, DType dtype) {
  const CudaRank::CallScope scope(rank_);
  group().check();  // a late peer may still write memory that a failed call has given back
  rank_.follow_caller();
  return rank_.take(dtype, {plan.capacity_rows(), config().width});
}

std::vector<std::shared_ptr<const void>> GpuPath::owners_of(
    std::span<const ConstTensorView> tensors) const {
  std::vector<std::shared_ptr<const void>> owners;
  for (const ConstTensorView& tensor : tensors) owners.push_back(DevicePool::owner_of(tensor.data));
  return owners;
}

void check_dispatch(const CudaRank& rank, const Plan& plan, const DispatchArgs& args,
                    const Begun* begun) {
  CROSSDOCK_CHECK(!args.on_chunk || begun == nullptr,
                  "begin_dispatch on a GPU does not call on_chunk; call next_chunk instead");
  check_args(plan, args, rank.where());
}

void call_on_chunk(Group& group, const Plan& plan, const DispatchArgs& args,
                   const DispatchResult& result) {
  if (!args.on_chunk) return;
  run_agreed(group, [&] {
    args.on_chunk(result, {0, plan.num_local_experts()});
    agree_on_chunks(group, plan);
  });
}

GatherSumKernelArgs sum_args(const char* operation, const Plan& plan, const GatherSumArgs& args,
                             const TensorView& out) {
  const CudaPlan& arrays = device_plan(plan);
  GatherSumKernelArgs sum{};
  sum.weights = args.weights.given() ? arrays.arrays().weights : nullptr;
  sum.T = plan.num_tokens();
  sum.K = arrays.shape().K;
  sum.D = static_cast<int32_t>(out.shape[1]);
  sum.dtype = args.rows.dtype;
  sum.out_dtype = args.rows.dtype;
  sum.out = static_cast<std::byte*>(out.data);
  sum.operation = operation_of(operation);
  return sum;
}

}  // namespace crossdock::cuda
