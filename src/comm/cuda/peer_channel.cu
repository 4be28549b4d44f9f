#include <algorithm>
#include <atomic>

#include "comm/cuda/peer_channel.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"
#include "core/cuda/launch.hpp"

namespace crossdock::cuda {
namespace {

// One block per rank.
__global__ void barrier_kernel(const __grid_constant__ PeerSignals signals, Operation operation) {
  wait_for_previous_kernel();
  peer_barrier(signals, operation);
  allow_next_kernel();  // not earlier: it could take the room of a peer's barrier
}

// One block per rank.
__global__ void exchange_kernel(const __grid_constant__ PeerSignals signals,
                                const __grid_constant__ QueuedCall call, Operation operation,
                                const __grid_constant__ PeerBases bases) {
  wait_for_previous_kernel();
  const SignalStart start = read_start(signals);
  if (!start.is_halted) {
    const uint32_t epoch = start.epoch + 1;
    __syncthreads();
    send_call(signals, call, epoch, start.failure);
    if (!start.is_poisoned) await_calls(signals, call, operation, epoch, &bases);
    if (threadIdx.x == 0) signals.state->epoch = epoch;
  }
  allow_next_kernel();  // not earlier: it could take the room of a peer's exchange
}

// One block per rank.
__global__ void farewell_kernel(const __grid_constant__ PeerSignals signals, uint32_t hash) {
  const SignalStart start = read_start(signals);
  if (start.is_halted) return;
  const QueuedCall call{.number = 0, .hash = hash, .num_shown = 0};
  send_call(signals, call, start.epoch + 1, start.failure);
}

// One thread.
__global__ void resume_kernel(SignalState* state) {
  if (failure_of(state->poison) == 0) state->poison = 0;
}

constexpr int kThreads = 96;
static_assert(kThreads >= kMaxPeers);
constexpr int kSumThreads = 256;

// One block per rank; a thread takes a value.
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(const __grid_constant__ PeerSignals signals, const __grid_constant__ PeerSums sums,
               Operation operation) {
  wait_for_previous_kernel();
  const SignalStart start = read_start(signals);
  const auto inbox = [&](int owner, int source) {
    std::byte* values = signals.mailbox[owner] + Mailbox::value_offset(start.epoch + 1, signals.P,
                                                                       source, signals.max_words);
    return reinterpret_cast<uint64_t*>(values);
  };
  for (int64_t i = threadIdx.x; i < sums.count && !start.is_poisoned; i += blockDim.x) {
    const auto value = static_cast<uint64_t>(sums.values[i]);
    for (int p = 0; p < signals.P; ++p) store_relaxed(inbox(p, signals.rank) + i, value);
  }
  const bool have_arrived = peer_barrier(signals, operation) && !is_poisoned(signals);
  for (int64_t i = threadIdx.x; i < sums.count; i += blockDim.x) {
    uint64_t sum = 0;
#pragma unroll 8
    for (int p = 0; p < signals.P; ++p) sum += load_relaxed(inbox(signals.rank, p) + i);
    sums.sums[i] = have_arrived ? static_cast<int64_t>(sum) : 0;
  }
  allow_next_kernel();  // not earlier: it could take the room of a peer's sum
}

}  // namespace

PeerChannel::PeerChannel(int rank, int size, DeviceArena& arena, const ChannelOptions& options) {
  CROSSDOCK_ASSERT(size <= kMaxPeers);
  static_assert(sizeof(FaultBoard) <= kHostWordBytes);
  const int64_t bytes = Mailbox::num_bytes(size, options.max_words);
  mailbox_ = allocate_device(arena, bytes);
  state_ = allocate_device(arena, sizeof(SignalState));
  shown_ = allocate_device(arena, sizeof(ShownMemory));
  faults_ = lease_host_words();
  const SignalState fresh;
  CROSSDOCK_CUDA(cudaMemsetAsync(mailbox_.data(), 0, static_cast<size_t>(bytes), arena.stream()));
  CROSSDOCK_CUDA(cudaMemcpyAsync(state_.data(), &fresh, sizeof(fresh), cudaMemcpyHostToDevice,
                                 arena.stream()));
  CROSSDOCK_CUDA(cudaStreamSynchronize(arena.stream()));
  signals_.rank = rank;
  signals_.P = size;
  signals_.max_words = options.max_words;
  signals_.deadline_ns = options.deadline.count();
  signals_.state = reinterpret_cast<SignalState*>(state_.data());
  signals_.shown = reinterpret_cast<ShownMemory*>(shown_.data());
  signals_.faults = reinterpret_cast<FaultBoard*>(faults_.data());
}

void PeerChannel::connect(std::span<std::byte* const> mailboxes) {
  CROSSDOCK_ASSERT(static_cast<int>(mailboxes.size()) == signals_.P);
  std::copy(mailboxes.begin(), mailboxes.end(), signals_.mailbox);
}

std::optional<Fault> PeerChannel::fault() const {
  const FaultBoard& board = *signals_.faults;
  for (const Fault* fault : {&board.fatal, &board.halted, &board.refused}) {
    if (const std::optional<Fault> found = read(*fault)) return found;
  }
  return std::nullopt;
}

std::optional<Fault> PeerChannel::halt() const {
  return read(signals_.faults->halted);
}

std::optional<Fault> PeerChannel::read(const Fault& fault) {
  if (static_cast<const volatile Fault&>(fault).code == 0) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  return fault;
}

void PeerChannel::clear_fault() {
  std::atomic_ref(signals_.faults->refused.code).store(0, std::memory_order_release);
}

void PeerChannel::clear_halt() {
  clear_fault();
  std::atomic_ref(signals_.faults->halted.code).store(0, std::memory_order_release);
}

void PeerChannel::abandon(std::optional<int> gone) {
  const uint32_t word =
      gone ? FaultBoard::kGone + static_cast<uint32_t>(*gone) : FaultBoard::kAbandon;
  uint32_t unset = 0;  // the first reason stays
  std::atomic_ref(signals_.faults->abandon)
      .compare_exchange_strong(unset, word, std::memory_order_release);
}

void load_channel_kernels() {
  load_kernels(barrier_kernel, exchange_kernel, sum_kernel, farewell_kernel, resume_kernel);
}

void launch_barrier(const PeerSignals& signals, Operation operation, cudaStream_t stream) {
  if (signals.P <= 1) return;  // nobody to wait for
  launch_early(barrier_kernel, 1, kThreads, stream, signals, operation);
}

void launch_exchange(const PeerSignals& signals, const QueuedCall& call, Operation operation,
                     const PeerBases& bases, cudaStream_t stream) {
  launch_early(exchange_kernel, 1, kThreads, stream, signals, call, operation, bases);
}

void launch_sums(const PeerSignals& signals, const PeerSums& sums, Operation operation,
                 cudaStream_t stream) {
  for (int64_t first = 0; first < sums.count; first += Mailbox::kMaxValues) {
    const PeerSums part{.values = sums.values + first,
                        .sums = sums.sums + first,
                        .count = std::min(Mailbox::kMaxValues, sums.count - first)};
    launch_early(sum_kernel, 1, kSumThreads, stream, signals, part, operation);
  }
}

void launch_farewell(const PeerSignals& signals, uint32_t hash, cudaStream_t stream) {
  farewell_kernel<<<1, kThreads, 0, stream>>>(signals, hash);
  CROSSDOCK_CUDA(cudaGetLastError());
}

void launch_resume(const PeerSignals& signals, cudaStream_t stream) {
  resume_kernel<<<1, 1, 0, stream>>>(signals.state);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::cuda
