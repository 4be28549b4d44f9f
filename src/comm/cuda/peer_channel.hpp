#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "comm/cuda/peer_signals.cuh"
#include "core/cuda/device_arena.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

struct ChannelOptions {
  int64_t max_words = 0;                // of one exchange of words, per rank
  std::chrono::nanoseconds deadline{};  // of one wait on the device
};

/// The words through which one rank's kernels and those of its peers wait for each other. Owns this
/// rank's mailbox; kernels get signals(). Kernels of one channel run one after the other.
class PeerChannel {
 public:
  /// For `size` ranks that reach each other's memory, of which this is number `rank`.
  /// REQUIRES: size <= kMaxPeers.
  PeerChannel(int rank, int size, DeviceArena& arena, const ChannelOptions& options);
  PeerChannel(const PeerChannel&) = delete;
  PeerChannel& operator=(const PeerChannel&) = delete;

  /// Memory that peers write; zeroed before the constructor returns.
  const Buffer& mailbox() const { return mailbox_; }
  /// Every rank's mailbox at the address where this process sees it.
  void connect(std::span<std::byte* const> mailboxes);
  const PeerSignals& signals() const { return signals_; }

  /// What the device has recorded, if anything, a fatal fault first; does not wait for the device.
  std::optional<Fault> fault() const;
  /// Forgets the fault that did not end the channel, so that the next one is recorded.
  void clear_fault();
  /// Ends the waits of this rank's kernels, now and later: nobody will come.
  void abandon();

 private:
  Buffer mailbox_;
  Buffer state_;
  Buffer faults_;
  PeerSignals signals_{};
};

/// A kernel that is nothing but a barrier of all ranks. REQUIRES load_barrier before.
void load_barrier();
void launch_barrier(const PeerSignals& signals, Operation operation, cudaStream_t stream);

}  // namespace crossdock::cuda
