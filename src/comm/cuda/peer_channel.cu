#include <algorithm>
#include <atomic>

#include "comm/cuda/peer_channel.hpp"
#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/host_words.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/load_kernels.hpp"

namespace crossdock::cuda {
namespace {

// One block per rank.
__global__ void barrier_kernel(const __grid_constant__ PeerSignals signals, Operation operation) {
  wait_for_previous_kernel();
  peer_barrier(signals, operation);
  allow_next_kernel();  // not earlier: it could take the room of a peer's barrier
}

}  // namespace

PeerChannel::PeerChannel(int rank, int size, DeviceArena& arena, const ChannelOptions& options) {
  CROSSDOCK_ASSERT(size <= kMaxPeers);
  static_assert(sizeof(FaultBoard) <= kHostWordBytes);
  const int64_t bytes = Mailbox::num_bytes(size, options.max_words);
  mailbox_ = allocate_device(arena, bytes);
  state_ = allocate_device(arena, sizeof(SignalState));
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
  signals_.faults = reinterpret_cast<FaultBoard*>(faults_.data());
}

void PeerChannel::connect(std::span<std::byte* const> mailboxes) {
  CROSSDOCK_ASSERT(static_cast<int>(mailboxes.size()) == signals_.P);
  std::copy(mailboxes.begin(), mailboxes.end(), signals_.mailbox);
}

std::optional<Fault> PeerChannel::fault() const {
  for (const Fault* fault : {&signals_.faults->fatal, &signals_.faults->refused}) {
    if (static_cast<const volatile Fault*>(fault)->code == 0) continue;
    std::atomic_thread_fence(std::memory_order_acquire);
    return *fault;
  }
  return std::nullopt;
}

void PeerChannel::clear_fault() {
  std::atomic_ref(signals_.faults->refused.code).store(0, std::memory_order_release);
}

void PeerChannel::abandon() {
  std::atomic_ref(signals_.faults->abandon).store(1, std::memory_order_release);
}

void load_barrier() {
  load_kernels(barrier_kernel);
}

void launch_barrier(const PeerSignals& signals, Operation operation, cudaStream_t stream) {
  constexpr int kThreads = 96;  // at least kMaxPeers
  static_assert(kThreads >= kMaxPeers);
  if (signals.P <= 1) return;  // nobody to wait for
  launch_early(barrier_kernel, 1, kThreads, stream, signals, operation);
}

}  // namespace crossdock::cuda
