#include <algorithm>
#include <atomic>

#include "comm/cuda/peer_channel.hpp"
#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"

namespace crossdock::cuda {
namespace {

// One block per rank.
__global__ void barrier_kernel(const __grid_constant__ PeerSignals signals, Operation operation) {
  peer_barrier(signals, operation);
}

}  // namespace

PeerChannel::PeerChannel(int rank, int size, const ChannelOptions& options) {
  CROSSDOCK_CHECK(size <= kMaxPeers, "at most ", kMaxPeers,
                  " ranks can reach each other's GPU memory, got ", size,
                  "; use hierarchical or alltoall");
  const int64_t bytes = Mailbox::num_bytes(size, options.max_words);
  mailbox_ = allocate_device(bytes, options.device);
  state_ = allocate_device(sizeof(SignalState), options.device);
  fault_ = allocate_pinned(sizeof(Fault));
  const SignalState fresh{.bad_route = ~uint64_t{0}};
  const DeviceGuard guard(options.device);
  CROSSDOCK_CUDA(cudaMemset(mailbox_.data(), 0, static_cast<size_t>(bytes)));
  CROSSDOCK_CUDA(cudaMemcpy(state_.data(), &fresh, sizeof(fresh), cudaMemcpyHostToDevice));
  CROSSDOCK_CUDA(cudaDeviceSynchronize());
  signals_.rank = rank;
  signals_.P = size;
  signals_.max_words = options.max_words;
  signals_.deadline_ns = options.deadline.count();
  signals_.state = reinterpret_cast<SignalState*>(state_.data());
  signals_.fault = reinterpret_cast<Fault*>(fault_.data());
}

void PeerChannel::connect(std::span<std::byte* const> mailboxes) {
  CROSSDOCK_ASSERT(static_cast<int>(mailboxes.size()) == signals_.P);
  std::copy(mailboxes.begin(), mailboxes.end(), signals_.mailbox);
}

std::optional<Fault> PeerChannel::fault() const {
  const volatile Fault* fault = signals_.fault;
  const uint32_t code = fault->code;
  if (code == 0 || code == ~0u) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  return *signals_.fault;
}

void PeerChannel::clear_fault() {
  std::atomic_ref(signals_.fault->code).store(0, std::memory_order_release);
}

void PeerChannel::abandon() {
  std::atomic_ref(signals_.fault->abandon).store(1, std::memory_order_release);
}

std::vector<std::unique_ptr<PeerChannel>> connect_in_process(
    std::span<const ChannelOptions> options) {
  const int size = static_cast<int>(options.size());
  std::vector<std::unique_ptr<PeerChannel>> channels;
  std::vector<std::byte*> mailboxes;
  for (int rank = 0; rank < size; ++rank) {
    channels.push_back(
        std::make_unique<PeerChannel>(rank, size, options[static_cast<size_t>(rank)]));
    mailboxes.push_back(channels.back()->mailbox().data());
  }
  for (int rank = 0; rank < size; ++rank) {
    for (const ChannelOptions& peer : options) {
      enable_peer_access(options[static_cast<size_t>(rank)].device, peer.device);
    }
    channels[static_cast<size_t>(rank)]->connect(mailboxes);
  }
  return channels;
}

void launch_barrier(const PeerSignals& signals, Operation operation, cudaStream_t stream) {
  constexpr int kThreads = 96;  // at least kMaxPeers
  static_assert(kThreads >= kMaxPeers);
  barrier_kernel<<<1, kThreads, 0, stream>>>(signals, operation);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::cuda
