#include "dispatch/cuda/gpu_call.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/call.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/host/peer_rows.hpp"

namespace crossdock::cuda {

GpuCall::GpuCall(CudaRank& rank, CallTerms terms, Begun* begun)
    : scope_(rank),
      rank_(rank),
      terms_(std::move(terms)),
      begun_(begun),
      lane_(&rank.streams().main()) {
  rank_.group().check();
}

GpuCall::~GpuCall() {
  if (!is_aside() || begun_->done) return;
  refusal_of([&] { rank_.streams().finish(mark()); });
}

void GpuCall::enter() {
  if (begun_ != nullptr) lane_ = &rank_.streams().enter_aside();
  rank_.check_usable();
  rank_.follow_caller();
  if (terms_.plan != nullptr) check_plan(rank_.context(), *terms_.plan);
}

const AgreedCall& GpuCall::agree(const Offer& offer) {
  // Begun calls have separate signals: all ranks must begin the call, or none.
  if (is_aside()) terms_.text += ";begun=1";
  agreed_ = rank_.agreement().agree({.lane = *lane_,
                                     .operation = terms_.operation,
                                     .subject = terms_.subject_id(),
                                     .call_text = std::move(terms_.text),
                                     .handles = std::move(shown_),
                                     .needs_barrier = offer.needs_barrier,
                                     .num_slots = offer.num_slots,
                                     .must_meet = offer.must_meet,
                                     .refusal = as_refusal(refusal_)},
                                    max_sms());
  return agreed_;
}

void GpuCall::record_copies() const {
  if (copied_bytes_ == 0) return;
  const EventRecorder::Scope copied(rank_.group().recorder(), agreed_.operation, agreed_.sequence,
                                    copied_bytes_, kForeignCopy);
}

int GpuCall::max_sms() const {
  const DeviceOptions& options = rank_.options();
  return is_aside() && options.max_begun_sms > 0 ? options.max_begun_sms : options.max_sms;
}

PeerSignals GpuCall::near_signals() const {
  PeerSignals near = signals();
  for (int p = 0; p < near.P; ++p) {
    if (!rank_.is_near(rank_.channel_ranks().rank_at(p))) near.mailbox[p] = nullptr;
  }
  return near;
}

PeerSignals GpuCall::local_signals() const {
  PeerSignals alone = signals();
  alone.P = 0;
  return alone;
}

// Peers that learn an address on the device have already chosen kernels for aligned rows.
bool GpuCall::hides(const void* data) const {
  return runs_ahead() && reinterpret_cast<uintptr_t>(data) % 16 != 0;
}

ExposedMemory GpuCall::show(const void* data, int64_t num_bytes, bool with_contents) {
  DevicePool& pool = rank_.pool();
  PeerMemory& peers = rank_.peers();
  ExposedMemory shown;
  if (num_bytes == 0) data = nullptr;
  shown.data = static_cast<std::byte*>(const_cast<void*>(data));
  shown.wanted = shown.data;
  shown.num_bytes = num_bytes;
  std::optional<MemoryBlock> block = pool.find(data);
  if (data != nullptr && ((!block && peers.needs_copy(data)) || hides(data))) {
    copied_bytes_ += num_bytes;
    const Buffer copy = pool.take(num_bytes, stream());
    shown.lease = copy.owner();
    shown.data = copy.data();
    block = pool.find(shown.data);
    if (with_contents) {
      CROSSDOCK_CUDA(cudaMemcpyAsync(shown.data, data, static_cast<size_t>(num_bytes),
                                     cudaMemcpyDeviceToDevice, stream()));
    }
  }
  if (!block) block = MemoryBlock{.base = shown.data, .num_bytes = num_bytes};
  const MemoryHandle handle = peers.show(shown.data, *block);
  const bool has_offset = handle.device >= 0 && peers.has_offsets();
  if (has_offset && runs_ahead() && handle.offset + num_bytes > peers.common_bytes()) {
    peers.publish();
  }
  shown.entry = shown_.size();
  shown_.push_back(handle);
  return shown;
}

void GpuCall::fetch(const ExposedMemory& shown) const {
  if (!shown.lease) return;
  CROSSDOCK_CUDA(cudaMemcpyAsync(shown.wanted, shown.data, static_cast<size_t>(shown.num_bytes),
                                 cudaMemcpyDeviceToDevice, stream()));
}

void GpuCall::zero_pads(const CudaPlan& plan, std::byte* rows, int64_t row_bytes) const {
  launch_pad_rows({.plan = plan.arrays(),
                   .shape = plan.shape(),
                   .P = plan.inputs().P,
                   .rank = plan.inputs().rank,
                   .num_local = static_cast<int32_t>(plan.inputs().num_local),
                   .rows = rows,
                   .row_bytes = row_bytes},
                  stream());
}

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

namespace {

void all_reduce_on_host(const GpuCall& call, const ConstTensorView& values,
                        const TensorView& sums) {
  std::vector<int64_t> sum(static_cast<size_t>(values.num_elements()));
  const auto copy = [&](void* to, const void* from) {
    CROSSDOCK_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(values.num_bytes()),
                                   cudaMemcpyDefault, call.stream()));
    call.await();
  };
  call.await();  // a copy to memory that is not page-locked waits without a deadline
  copy(sum.data(), values.data);
  call.rank().group().all_reduce(TensorView(sum.data(), values.shape));
  copy(sums.data, sum.data());
}

}  // namespace

// A call of the kind of a plan: a rank may refuse to connect in either.
OwnedTensor GpuPath::all_reduce(const ConstTensorView& values) {
  rank_.join_peers();
  const bool is_in_reach = rank_.channel_ranks().size() == group().size();
  GpuCall call(rank_, {.operation = "plan",
                       .plan = nullptr,
                       .text = concat(context_.config_text,
                                      ";weights=fp32;device=cuda;values=", values.num_elements())});
  OwnedTensor sums;
  call.prepare([&] {
    CROSSDOCK_CHECK(is_in_reach || !is_capturing(call.stream()),
                    "counts of a layer on GPUs that cannot reach each other's memory go through "
                    "host memory, which cannot be captured in a graph");
    check_tensor("values", values, rank_.where(), DType::kI64, values.shape);
    sums = call.take(DType::kI64, values.shape);
  });
  const AgreedCall& agreed = call.agree({});
  call.move([&] {
    if (!is_in_reach) return all_reduce_on_host(call, values, sums.view);
    if (agreed.is_queued()) call.await_peers(Operation::kPlan);
    launch_sums(call.signals(),
                {.values = static_cast<const int64_t*>(values.data),
                 .sums = static_cast<int64_t*>(sums.view.data),
                 .count = values.num_elements()},
                Operation::kPlan, call.stream());
  });
  return sums;
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
