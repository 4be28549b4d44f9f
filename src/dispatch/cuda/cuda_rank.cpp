#include "dispatch/cuda/cuda_rank.hpp"

#include <algorithm>
#include <utility>

#include "comm/agreement/items.hpp"
#include "comm/attachment.hpp"
#include "comm/cuda/peer_channel.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "core/descriptor.hpp"
#include "core/process.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/cuda/kernels/link_rows.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "ops/cuda/device_rows.hpp"
#include "ops/fp8_rows.hpp"
#include "plan/cuda/device_plan.hpp"
#include "plan/local_routes.hpp"

namespace crossdock::cuda {
namespace {

// Loads all kernels that any call may need. Loading one later could deadlock: it may wait until
// the device is idle, while another dispatcher's kernels wait for a rank that has not launched
// yet.
void load_all_kernels(int64_t shared_memory) {
  load_channel_kernels();
  load_plan(shared_memory);
  load_route_slots();
  load_scatter();
  load_scatter_chunk();
  load_gather_sum();
  load_gather_sum_backward();
  load_gather_routes();
  load_link_rows();
  load_fan_out();
  load_partial_sums();
  load_move_rows();
  load_pad_rows();
  load_sum_groups();
  ops::load_device_rows();
  ops::load_fp8_rows();
}

// Copies owner, experts_by_owner and owner_offsets to the device, contiguous in this order.
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

}  // namespace

CudaRank::CudaRank(const PathContext& context, int device, const ChannelUse& use)
    : context_(context),
      device_(existing_device(device)),
      streams_(group(), device_),
      peers_(context_.group.communicator(), device,
             comm::gpu_pretences_of(group()).peers_are_elsewhere),
      shared_memory_(comm::gpu_pretences_of(group()).shared_memory_per_block.value_or(
          shared_memory_per_block(device))),
      waits_(use.waits),
      channel_ranks_(group().topology(), group().rank(), use.waits),
      ahead_({.context = context_,
              .device = device_,
              .streams = streams_,
              .channel_ranks = channel_ranks_,
              .is_allowed = use.may_run_ahead}),
      agreement_(ahead_, peers_),
      placement_(make_placement(config(), group().size())) {
  check_channel_size(use, group().topology(), channel_ranks_, kMaxPeers);
  if (waits_ == Waits::kNone) peers_.set_peer_devices({});
  const CallGuard guard(device_);
  load_all_kernels(shared_memory_);
  if (!peers_.needs_export()) open();
}

void CudaRank::join_peers() {
  if (pool_) return;
  const CallGuard guard(device_);
  const std::optional<Error> unusable = refusal_of([&] { check_usable(); });
  const std::string& config = context_.config_text;
  // Between nodes NCCL may register buffers; some versions cannot if a buffer spans chunks.
  peers_.share_memory(group(), {.reaches_peers = waits_ != Waits::kNone,
                                .prefers_ipc = group().topology().num_nodes > 1,
                                .config = config,
                                .refusal = as_refusal(unusable)});
  const std::optional<Error> refusal = refusal_of([&] { open(); });
  try {
    group().agree(
        {.operation = "plan", .config = config, .under_way = true, .refusal = as_refusal(refusal)});
  } catch (...) {
    pool_.reset();
    throw;
  }
}

void CudaRank::open() {
  const StandardDescriptorGuard guard;  // the driver opens devices
  pool_.emplace(DeviceArena::make(device_, peers_.sharing()));
  pool_->follow_threads(streams_.is_per_thread());
  pool_->set_lasting_stream(streams_.callers_stream());
  const int64_t E = config().num_experts;
  streams_.open([this] { return make_lane(); });
  const Buffer tables = upload(placement_, pool_->arena());
  tables_ = tables.owner();
  const auto* owner = reinterpret_cast<const int32_t*>(tables.data());
  shape_ = {
      .K = 0,
      .E = static_cast<int32_t>(E),
      .alignment = static_cast<int32_t>(config().alignment),
      .capacity = PlanShape::kNoCapacity,
      .pad_to_capacity = config().capacity && config().capacity->pad_to_capacity,
      .keep_empty_segments = config().keep_empty_segments,
      .reject_nonfinite = config().nonfinite == NonFinite::kReject,
      .max_rows = std::min(config().max_rows.value_or(PlanShape::kMostRows), PlanShape::kMostRows),
      .owner = owner,
      .by_owner = owner + E,
      .owner_offsets = owner + 2 * E};
}

RankStreams::Lane CudaRank::make_lane() {
  RankStreams::Lane lane;
  lane.channel = std::make_shared<PeerChannel>(
      channel_ranks_.slot_of(group().rank()), channel_ranks_.size(), pool_->arena(),
      ChannelOptions{.max_words = plan_words(config().num_experts),
                     .deadline = *group().options().arrival_deadline});
  lane.is_connected = waits_ == Waits::kNone;
  // A late or stalled peer may write its flags after this rank has left.
  group().communicator().keep_alive(lane.channel->mailbox().owner());
  return lane;
}

CudaRank::~CudaRank() {
  if (!pool_) return;  // nothing has been queued
  const DeviceGuard guard(device_, std::nothrow);
  const RelaxedCapture relaxed;
  ahead_.say_farewell();
  bool is_done = true;
  bool is_broken = group().is_poisoned();
  for (const RankStreams::Lane* lane : streams_.lanes()) {
    is_done = streams_.ends_in_time(*lane) && is_done;
    const std::optional<Fault> fault = lane->channel->fault();  // may not be reported yet
    is_broken = is_broken || group().is_poisoned() || (fault && is_fatal(*fault));
  }
  for (const std::shared_ptr<const void>& mailbox : ahead_.late_mailboxes()) leak(mailbox);
  if (!is_done) peers_.skip_unmapping();
  // After a failure peers may still be writing. Memory that another process has mapped is neither
  // freed nor reused; and cudaFree waits for the device, which may never finish.
  if (!is_done || (is_broken && peers_.needs_export())) {
    leak_memory();
  } else if (is_broken) {
    group().communicator().keep_alive(pool_->memory());
  }
}

void CudaRank::leak_memory() noexcept {
  leak(pool_->memory());
  leak(tables_);
  for (const RankStreams::Lane* lane : streams_.lanes()) {
    leak(lane->channel);
    for (const Buffer& buffer : lane->scratch) leak(buffer.owner());
  }
  for (const std::shared_ptr<const void>& room : agreement_.reservations()) leak(room);
}

void CudaRank::set_options(const DeviceOptions& options) {
  const cudaStream_t before = streams_.set_callers_stream(options.stream);
  options_ = options;
  if (pool_) {
    const CallGuard guard(device_);
    pool_->follow_threads(streams_.is_per_thread());
    pool_->set_lasting_stream(streams_.callers_stream());
  }
  streams_.wait_for(before);
}

CudaPlanInputs CudaRank::plan_inputs(int64_t T, int64_t K) const {
  CudaPlanInputs inputs{.T = T,
                        .P = group().size(),
                        .rank = group().rank(),
                        .num_local = 0,
                        .shape = shape_,
                        .tables = tables_,
                        .stream = stream(),
                        .watch = streams_.watch(),
                        .is_per_thread = streams_.is_per_thread(),
                        .capture_id = capture_id(stream())};
  inputs.shape.K = static_cast<int32_t>(K);
  const auto r = static_cast<size_t>(inputs.rank);
  inputs.num_local = placement_.owner_offsets[r + 1] - placement_.owner_offsets[r];
  if (config().capacity) {
    const int64_t counted = shape_.pad_to_capacity ? config().capacity->max_tokens : T;
    inputs.shape.capacity =
        std::min(crossdock::capacity_rows(config(), counted), PlanShape::kNoCapacity);
  }
  return inputs;
}

OwnedTensor CudaRank::take(DType dtype, const Shape& shape, cudaStream_t stream) {
  return owned_tensor(pool_->take(shape.num_elements() * size_of(dtype), stream), dtype, shape);
}

std::byte* CudaRank::scratch(int64_t num_bytes) {
  std::vector<Buffer>& buffers = streams_.main().scratch;
  if (buffers.empty() || buffers.back().num_bytes() < num_bytes) {
    buffers.push_back(allocate_device(pool_->arena(), num_bytes));
  }
  return buffers.back().data();
}

void CudaRank::check_usable() {
  group().check();
  raise_faults();
  CROSSDOCK_CHECK(options_.max_sms >= 0, "max_sms must be 0 (all) or more, got ", options_.max_sms);
  CROSSDOCK_CHECK(options_.max_begun_sms >= 0, "max_begun_sms must be 0 (max_sms) or more, got ",
                  options_.max_begun_sms);
  CROSSDOCK_CHECK(options_.nccl_comm == context_.options.nccl_comm,
                  "nccl_comm must be set before the first plan and must not change; make another "
                  "dispatcher for another communicator");
}

}  // namespace crossdock::cuda
