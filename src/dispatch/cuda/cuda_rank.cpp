#include "dispatch/cuda/cuda_rank.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/kernels/gather_routes.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/cuda/kernels/gather_sum_backward.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/pad_rows.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "ops/fp8_rows.hpp"
#include "plan/capacity.hpp"

namespace crossdock::cuda {
namespace {

// Owner, experts by owner and owner offsets, one after the other on the device.
Buffer upload(const Placement& placement, DeviceArena& arena) {
  std::vector<int32_t> tables = placement.owner;
  tables.insert(tables.end(), placement.experts_by_owner.begin(), placement.experts_by_owner.end());
  tables.insert(tables.end(), placement.owner_offsets.begin(), placement.owner_offsets.end());
  const auto num_bytes = static_cast<int64_t>(tables.size() * sizeof(int32_t));
  Buffer buffer = allocate_device(arena, num_bytes);
  CROSSDOCK_CUDA(cudaMemcpyAsync(buffer.data(), tables.data(), static_cast<size_t>(num_bytes),
                                 cudaMemcpyHostToDevice, arena.stream()));
  CROSSDOCK_CUDA(cudaStreamSynchronize(arena.stream()));
  return buffer;
}

int existing_device(int device) {
  int count = 0;
  CROSSDOCK_CUDA(cudaGetDeviceCount(&count));
  CROSSDOCK_CHECK(device >= 0 && device < count, "the tensors are on GPU ", device,
                  ", this process has ", count);
  return device;
}

void keep_for_ever(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<const void>>;  // never freed: the point
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

// All kernels that a call may need, whatever this dispatcher does: the device may have to be idle
// to load one, where kernels of another dispatcher may be waiting for a rank that has not launched.
void load_all_kernels() {
  load_barrier();
  load_plan();
  load_scatter();
  load_gather_sum();
  load_gather_sum_backward();
  load_gather_routes();
  load_move_rows();
  load_pad_rows();
  ops::load_fp8_rows();
}

}  // namespace

CudaRank::CudaRank(const PathContext& context, int device, const ChannelUse& use)
    : context_(context),
      device_(existing_device(device)),
      callers_(device_),
      peers_(context_.group.communicator(), device),
      pool_(DeviceArena::make(device, peers_.needs_export())),
      watch_(std::make_shared<StreamWatch>(
          StreamWatch::Options{.rank = group().rank(),
                               .size = group().size(),
                               .device = device,
                               .arrival_deadline = *group().options().arrival_deadline,
                               .progress_deadline = *group().options().progress_deadline})),
      waits_(use.waits),
      channel_ranks_(group().topology(), group().rank(), use.waits),
      placement_(make_placement(config(), group().size())) {
  if (waits_ == Waits::kForAll) peers_.check_reach();
  check_channel_size(use, group().topology(), channel_ranks_, kMaxPeers);
  if (waits_ == Waits::kForNobody) peers_.set_peer_devices({});
  const CallGuard guard(device_);
  load_all_kernels();
  const int64_t E = config().num_experts;
  main_ = make_lane();
  const Buffer tables = upload(placement_, pool_.arena());
  tables_ = tables.owner();
  const auto* owner = reinterpret_cast<const int32_t*>(tables.data());
  shape_ = {
      .K = static_cast<int32_t>(config().top_k),
      .E = static_cast<int32_t>(E),
      .alignment = static_cast<int32_t>(config().alignment),
      .capacity = PlanShape::kNoCapacity,
      .pad_to_capacity = config().capacity && config().capacity->pad_to_capacity,
      .reject_nonfinite = config().nonfinite == NonFinite::kReject,
      .max_rows = std::min(config().max_rows.value_or(PlanShape::kMostRows), PlanShape::kMostRows),
      .owner = owner,
      .by_owner = owner + E,
      .owner_offsets = owner + 2 * E};
}

CudaRank::Lane CudaRank::make_lane() {
  Lane lane;
  lane.channel = std::make_shared<PeerChannel>(
      channel_ranks_.slot_of(group().rank()), channel_ranks_.size(), pool_.arena(),
      ChannelOptions{.max_words = plan_words(config().num_experts),
                     .deadline = *group().options().arrival_deadline});
  lane.is_connected = waits_ == Waits::kForNobody;
  // A peer that is late, or stalled, may write its flags after this rank has gone.
  group().communicator().keep_alive(lane.channel->mailbox().owner());
  return lane;
}

std::vector<CudaRank::Lane*> CudaRank::lanes() {
  std::vector<Lane*> all{&main_};
  if (aside_) all.push_back(&*aside_);
  return all;
}

CudaRank::~CudaRank() {
  const DeviceGuard guard(device_, std::nothrow);
  const RelaxedCapture relaxed;
  bool is_done = true;
  bool is_broken = group().is_poisoned();
  for (const Lane* lane : lanes()) {
    is_done = ends_in_time(*lane) && is_done;
    const std::optional<Fault> fault = lane->channel->fault();  // no call may have reported it yet
    is_broken = is_broken || group().is_poisoned() || (fault && is_fatal(*fault));
  }
  if (!is_done) peers_.leave_mapped();
  // After a failure peers may still be writing. Memory that another process has mapped is neither
  // freed nor handed out again; and cudaFree waits for the device, which may never be done.
  if (!is_done || (is_broken && peers_.needs_export())) {
    keep_memory_for_ever();
  } else if (is_broken) {
    group().communicator().keep_alive(pool_.memory());
  }
}

// Whether nothing of a lane runs any more. If it does not end in time, the group fails.
bool CudaRank::ends_in_time(const Lane& lane) noexcept {
  const bool is_poisoned = group().is_poisoned();
  if (is_poisoned) lane.channel->abandon();  // ends the waits of this rank's kernels
  const cudaStream_t stream = lane.stream ? lane.stream->get() : callers_stream();
  const std::optional<Error> error =
      is_poisoned ? watch_->try_await(stream, *group().options().progress_deadline)
                  : watch_->try_await(stream);
  if (!error || error->code() == ErrorCode::kCuda) return true;  // kCuda: the context is lost
  group().fail(*error);
  lane.channel->abandon();
  return false;
}

void CudaRank::keep_memory_for_ever() noexcept {
  keep_for_ever(pool_.memory());
  keep_for_ever(tables_);
  for (const Lane* lane : lanes()) keep_for_ever(lane->channel);
  for (const auto& [request, room] : waiting_rooms_) keep_for_ever(room);
}

void CudaRank::await(cudaStream_t stream) const {
  const std::optional<Error> error = watch_->try_await(stream);
  if (!error) return;
  if (error->code() == ErrorCode::kCuda) throw *error;
  group().fail(*error);
  group().check();
}

cudaStream_t CudaRank::stream() const {
  return lane().stream ? lane().stream->get() : callers_stream();
}

void CudaRank::set_options(const DeviceOptions& options) {
  const CallGuard guard(device_);
  const cudaStream_t before = callers_stream();
  const cudaStream_t wanted = wanted_stream(options);
  // Taking a stream that stands in for the threads' own may wait for the device (see begin_aside).
  const bool takes_stream = wanted == cudaStreamPerThread && !callers_.is_per_thread();
  if (takes_stream && has_queued_ && !is_capturing(before)) {
    CROSSDOCK_CUDA(cudaStreamSynchronize(before));
  }
  options_ = options;
  callers_.set(wanted);
  pool_.follow_threads(callers_.is_per_thread());
  const cudaStream_t after = callers_stream();
  // Kernels of a channel run one after the other. Between a graph and what runs now there is no
  // order to keep.
  if (after == before || !has_queued_ || is_capturing(before) || is_capturing(after)) return;
  const OwnedEvent here(device_);
  here.record(before);
  here.make_wait(after);
}

void CudaRank::begin_aside() {
  const CallGuard guard(device_);
  follow_caller();
  if (!aside_) {
    // Taking memory and a stream may wait for the device, where a peer's kernel may be waiting for
    // one that is not launched yet. When this rank's kernels have ended, all are.
    if (!is_capturing(callers_stream())) await(callers_stream());
    Lane lane = make_lane();
    lane.stream = lease_stream(device_);
    aside_ = std::move(lane);
  }
  const OwnedEvent here(device_);
  here.record(callers_stream());
  here.make_wait(aside_->stream->get());
  is_aside_ = true;
}

std::shared_ptr<const void> CudaRank::end_aside() {
  const CallGuard guard(device_);
  is_aside_ = false;
  auto done = std::make_shared<OwnedEvent>(device_);
  done->record(aside_->stream->get());
  return done;
}

void CudaRank::finish(const std::shared_ptr<const void>& done) const {
  const CallScope scope(*this);
  if (done) static_cast<const OwnedEvent*>(done.get())->make_wait(callers_stream());
}

cudaStream_t CudaRank::wanted_stream(const DeviceOptions& options) const {
  const cudaStream_t given = handle_of(options.stream);
  const bool is_default = given == nullptr || given == cudaStreamLegacy;
  // In one queue the kernels of several ranks would wait for each other forever.
  const bool shares_queue =
      is_default && group().size() > 1 && group().communicator().shares_address_space();
  return shares_queue ? cudaStreamPerThread : given;
}

PeerSignals CudaRank::near_signals() const {
  PeerSignals near = signals();
  for (int p = 0; p < near.P; ++p) {
    if (!is_near(channel_ranks_.rank_at(p))) near.mailbox[p] = nullptr;
  }
  return near;
}

PeerSignals CudaRank::signals_alone() const {
  PeerSignals alone = signals();
  alone.P = 0;
  return alone;
}

CudaPlanInputs CudaRank::plan_inputs(int64_t T) const {
  CudaPlanInputs inputs{.T = T,
                        .P = group().size(),
                        .rank = group().rank(),
                        .num_local = 0,
                        .shape = shape_,
                        .tables = tables_,
                        .stream = stream(),
                        .watch = watch_,
                        .is_per_thread = callers_.is_per_thread(),
                        .capture_id = capture_id(stream())};
  const auto r = static_cast<size_t>(inputs.rank);
  inputs.num_local = placement_.owner_offsets[r + 1] - placement_.owner_offsets[r];
  if (config().capacity) {
    const int64_t counted = shape_.pad_to_capacity ? config().capacity->max_tokens : T;
    inputs.shape.capacity =
        std::min(crossdock::capacity_rows(config(), counted), PlanShape::kNoCapacity);
  }
  return inputs;
}

void CudaRank::check_device(const char* name, const ConstTensorView& tensor) const {
  CROSSDOCK_CHECK(tensor.device == where(), name, " must be on GPU ", device_,
                  ", as the first routing was; it is ",
                  tensor.device.is_cpu() ? std::string("in host memory")
                                         : concat("on GPU ", tensor.device.index));
}

void CudaRank::check_tensor(const char* name, const ConstTensorView& tensor,
                            const Shape& shape) const {
  CROSSDOCK_CHECK(tensor.shape == shape, name, " must be ", shape.to_string(), ", got ",
                  describe(tensor));
  check_device(name, tensor);
  CROSSDOCK_CHECK(tensor.data != nullptr || tensor.num_elements() == 0, name, " of shape ",
                  shape.to_string(), " must have memory, got a null pointer");
}

OwnedTensor CudaRank::take(DType dtype, const Shape& shape) {
  const Buffer buffer = pool_.take(shape.num_elements() * size_of(dtype), stream());
  return {.view = buffer.view(dtype, shape), .owner = buffer.owner()};
}

OwnedTensor CudaRank::output_or_new(const char* name, const TensorView& given, DType dtype,
                                    const Shape& shape) {
  if (!given.given()) return take(dtype, shape);
  check_tensor(name, given, shape);
  CROSSDOCK_CHECK(given.dtype == dtype, name, " must be ", name_of(dtype), ", got ",
                  name_of(given.dtype));
  return {.view = given, .owner = nullptr};
}

void CudaRank::zero_pads(const CudaPlan& plan, std::byte* rows, int64_t row_bytes) const {
  launch_pad_rows({.plan = plan.arrays(),
                   .shape = plan.shape(),
                   .P = plan.inputs().P,
                   .rank = plan.inputs().rank,
                   .num_local = static_cast<int32_t>(plan.inputs().num_local),
                   .rows = rows,
                   .row_bytes = row_bytes},
                  stream());
}

void CudaRank::check_usable() {
  group().check();
  raise_faults();
  CROSSDOCK_CHECK(options_.max_sms >= 0, "max_sms must be 0 (all) or more, got ", options_.max_sms);
  CROSSDOCK_CHECK(options_.nccl_comm == context_.options.nccl_comm,
                  "nccl_comm must be given before the first plan, and stay; make another "
                  "dispatcher for another communicator");
}

void CudaRank::raise_faults() {
  for (const bool fatal : {true, false}) {
    for (const Lane* lane : lanes()) {
      const std::optional<Fault> fault = lane->channel->fault();
      if (fault && is_fatal(*fault) == fatal) raise(*lane, *fault);
    }
  }
  if (const std::optional<Error> error = watch_->fault()) {
    group().fail(*error);
    group().check();
  }
}

void CudaRank::raise(const Lane& lane, Fault fault) {
  fault.culprit = channel_ranks_.rank_at(fault.culprit);
  const Error error = to_error(fault, {.rank = group().rank(),
                                       .P = group().size(),
                                       .shape = shape_,
                                       .deadline_ns = lane.channel->signals().deadline_ns,
                                       .shares_gpu = num_sharing_ > 1});
  if (is_fatal(fault)) {
    group().fail(error);
  } else {
    lane.channel->clear_fault();
  }
  throw error;
}

}  // namespace crossdock::cuda
