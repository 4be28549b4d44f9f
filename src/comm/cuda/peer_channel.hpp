#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "comm/cuda/peer_calls.cuh"
#include "comm/cuda/peer_signals.cuh"
#include "core/cuda/device_arena.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

struct ChannelOptions {
  int64_t max_words = 0;                // per rank in one exchange of words
  std::chrono::nanoseconds deadline{};  // of one wait on the device
};

/// The words by which the kernels of one rank and its peers wait for each other. Owns this rank's
/// mailbox; kernels get signals(). Kernels of one channel run one at a time.
class PeerChannel {
 public:
  /// For `size` ranks that reach each other's memory; this one is `rank`.
  /// REQUIRES: size <= kMaxPeers.
  PeerChannel(int rank, int size, DeviceArena& arena, const ChannelOptions& options);
  PeerChannel(const PeerChannel&) = delete;
  PeerChannel& operator=(const PeerChannel&) = delete;

  /// Memory that peers write; zeroed before the constructor returns.
  const Buffer& mailbox() const { return mailbox_; }
  /// Sets the address of every rank's mailbox in this process.
  void connect(std::span<std::byte* const> mailboxes);
  const PeerSignals& signals() const { return signals_; }

  /// The fault that the device has recorded, if any: a fatal one first, then one that halts. Does
  /// not wait for the device.
  std::optional<Fault> fault() const;
  /// The fault that has halted the channel, if any.
  std::optional<Fault> halt() const;
  /// Clears a fault that ended one step, so the next one is recorded.
  void clear_fault();
  /// Clears the fault that has halted the channel as well. REQUIRES: no kernel is running.
  void clear_halt();
  /// Ends all waits of this rank's kernels, present and future: no peer will arrive or, if `gone`
  /// is given, that peer's process has ended. Thread-safe.
  void abandon(std::optional<int> gone = {});

 private:
  static std::optional<Fault> read(const Fault& fault);

  Buffer mailbox_;
  Buffer state_;
  Buffer shown_;
  Buffer faults_;
  PeerSignals signals_{};
};

/// Loads the kernels below; before the first launch.
void load_channel_kernels();
/// A barrier of all ranks and nothing else.
void launch_barrier(const PeerSignals& signals, Operation operation, cudaStream_t stream);
/// A barrier of all ranks that also exchanges their calls: afterwards signals.shown has what they
/// show, or the channel is halted because the calls differ.
void launch_exchange(const PeerSignals& signals, const QueuedCall& call, Operation operation,
                     const PeerBases& bases, cudaStream_t stream);

/// Values that all ranks add up.
struct PeerSums {
  const int64_t* values;  // [count]
  int64_t* sums;          // [count] out; 0 if the channel has ended or is halted
  int64_t count;          // identical on every rank
};
/// Every rank sends its values to the inboxes of all and adds what arrives in its own. One barrier
/// for every Mailbox::kMaxValues values. REQUIRES: kernels wait for all ranks.
void launch_sums(const PeerSignals& signals, const PeerSums& sums, Operation operation,
                 cudaStream_t stream);

/// Tells the peers that this rank queues no further calls (kStops) or has failed, without waiting.
void launch_farewell(const PeerSignals& signals, uint32_t hash, cudaStream_t stream);
/// Ends a halt. REQUIRES: the hosts of all ranks have met, and no rank's kernels are running.
void launch_resume(const PeerSignals& signals, cudaStream_t stream);

}  // namespace crossdock::cuda
