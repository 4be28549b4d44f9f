#include "dispatch/cuda/cuda_path.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/host_routing.hpp"

namespace crossdock::cuda {

CudaPath::CudaPath(const PathContext& context, int device, const ChannelUse& use)
    : FramedPath(context, {.where = " on a GPU", .takes_fp64 = false, .only_queues = true}),
      rank_(this->context(), device, use) {}

Plan CudaPath::plan(const Routing& routing) {
  const CudaRank::CallScope scope(rank_);
  rank_.meet();
  connect();
  return plan_on_host(rank_, routing, [&](const Plan& made) { return upload(made); });
}

Plan CudaPath::plan(const DenseRouting& routing) {
  const CudaRank::CallScope scope(rank_);
  rank_.meet();
  connect();
  return plan_on_host(rank_, routing, [&](const Plan& made) { return upload(made); });
}

uint64_t CudaPath::run(const Call& call, const MakeReady& make_ready) {
  const CudaRank::CallScope scope(rank_);
  rank_.take_copied_bytes();  // discards those of a refused call
  // Returns the call's memory while its stream, and any capture of it, still exist.
  struct Release {
    CudaCall& call;
    ~Release() { call = {}; }
  } const release{call_};
  return FramedPath::run(call, make_ready);
}

void CudaPath::check_usable() {
  rank_.check_usable();
  rank_.follow_caller();
}

OwnedTensor CudaPath::output_or_new(const char* name, const TensorView& given, DType dtype,
                                    const Shape& shape) {
  return rank_.output_or_new(name, given, dtype, shape);
}

OwnedTensor CudaPath::take_rows(const char* /*operation*/, const Plan& plan, DType dtype) {
  return rank_.take(dtype, {plan.capacity_rows(), config().width});
}

OwnedTensor CudaPath::allocate_rows(const Plan& plan, DType dtype) {
  const CudaRank::CallScope scope(rank_);
  group().check();  // a late peer may still write memory that a failed call has given back
  rank_.follow_caller();
  return take_rows("allocate_rows", plan, dtype);
}

uint64_t CudaPath::agree(const Call& call, const std::optional<Error>& refusal) {
  // Begun calls have separate signals: all ranks must begin the call, or none.
  const bool is_begun = rank_.streams().is_aside();
  agreed_ = rank_.agree({.operation = call.operation,
                         .subject = call.subject_id(),
                         .call_text = is_begun ? call.text + ";begun=1" : call.text,
                         .handles = std::move(call_.handles),
                         .needs_barrier = call_.needs_barrier,
                         .must_meet = call.must_meet,
                         .refusal = as_refusal(refusal)});
  return agreed_.sequence;
}

ReadyCall CudaPath::ready(CudaCall call) {
  call_ = std::move(call);
  return {.move = [this](uint64_t /*sequence*/) { call_.queue(agreed_); },
          .copied_bytes = rank_.take_copied_bytes()};
}

ReadyCall CudaPath::ready_agreement(const char* operation) {
  return ready({.queue = [this, operation](const CudaRank::Agreed& agreed) {
    if (agreed.is_queued()) rank_.await_peers(agreed, operation_of(operation));
  }});
}

GatherSumKernelArgs CudaPath::sum_args(const char* operation, const Plan& plan,
                                       const GatherSumArgs& args) const {
  const CudaPlan& arrays = device_plan(plan);
  GatherSumKernelArgs sum{};
  sum.weights = args.weights.given() ? arrays.arrays().weights : nullptr;
  sum.T = plan.num_tokens();
  sum.K = arrays.shape().K;
  sum.D = static_cast<int32_t>(config().width);
  sum.dtype = args.rows.dtype;
  sum.out_dtype = args.rows.dtype;
  sum.out = static_cast<std::byte*>(args.out.data);
  sum.operation = operation_of(operation);
  return sum;
}

}  // namespace crossdock::cuda
