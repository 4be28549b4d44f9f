#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda/peer_channel.hpp"
#include "comm/cuda/peer_memory.hpp"
#include "comm/cuda/peer_signals.cuh"
#include "core/cuda/device_pool.hpp"
#include "dispatch/cuda/channel_ranks.hpp"
#include "dispatch/cuda/rank_agreement.hpp"
#include "dispatch/cuda/rank_streams.hpp"
#include "dispatch/cuda/run_ahead.hpp"
#include "dispatch/path.hpp"
#include "plan/cuda/cuda_plan.hpp"
#include "plan/placement.hpp"

namespace crossdock::cuda {

/// One rank's side of a dispatcher on a GPU: its memory, its signals, and how it agrees with the
/// others.
class CudaRank {
 public:
  /// The context must outlive this object.
  CudaRank(const PathContext& context, int device, const ChannelUse& use);
  /// Waits for this rank's streams, since they use what it owns, but no longer than the deadlines.
  /// Memory that is still in use then is never freed, and the group fails.
  ~CudaRank();
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  /// Called at the beginning of every plan. The first time, ranks that are processes agree on how
  /// they share memory; before that, the rank has no memory and no lanes. Collective. On failure,
  /// throws the same error on all ranks.
  void join_peers();

  /// Surrounds every call.
  class CallScope : public RankStreams::CallScope {
   public:
    explicit CallScope(const CudaRank& rank) : RankStreams::CallScope(rank.streams_) {}
  };
  /// See RankStreams.
  void follow_caller() const { streams_.follow_caller(); }

  const PathContext& context() const { return context_; }
  const DispatchConfig& config() const { return *context_.config; }
  Group& group() const { return context_.group; }
  int device() const { return device_; }
  Device where() const { return {.kind = DeviceKind::kCuda, .index = device_}; }
  void set_options(const DeviceOptions& options);
  /// The streams in which calls queue their work and wait for it.
  RankStreams& streams() { return streams_; }
  const RankStreams& streams() const { return streams_; }
  /// The caller's stream, in which plans are made.
  cudaStream_t stream() const { return streams_.callers_stream(); }
  StreamWatch& watch() const { return *streams_.watch(); }
  /// Waits for stream(). On a timeout, fails the group and throws.
  void await_stream() const { streams_.await(streams_.main()); }
  const DeviceOptions& options() const { return options_; }
  /// Bytes per block that plans may use.
  int64_t shared_memory() const { return shared_memory_; }
  /// Ranks of this process on this GPU, this one included.
  int num_sharing() const { return ahead_.num_sharing(); }
  DevicePool& pool() { return *pool_; }
  /// The signals of kernels in stream().
  const PeerSignals& signals() const { return streams_.main().channel->signals(); }
  PeerMemory& peers() { return peers_; }
  bool is_near(int peer) const { return peers_.is_near(peer); }
  /// The ranks of this rank's channels. Targets in kernels that wait are slots among them.
  const ChannelRanks& channel_ranks() const { return channel_ranks_; }

  const Placement& placement() const { return placement_; }
  /// The inputs for plans of T tokens with K slots each.
  CudaPlanInputs plan_inputs(int64_t T, int64_t K) const;

  /// Memory for work in stream().
  OwnedTensor take(DType dtype, const Shape& shape) { return take(dtype, shape, stream()); }
  OwnedTensor take(DType dtype, const Shape& shape, cudaStream_t stream);
  /// Memory that the kernels of plans use in turn; contents are unspecified.
  std::byte* scratch(int64_t num_bytes);

  RankAgreement& agreement() { return agreement_; }
  /// Whether the next call in the caller's stream only queues, without meeting the other hosts.
  bool runs_ahead() const { return agreement_.runs_ahead(streams_.main()); }

  /// See RunAhead.
  void raise_faults() { ahead_.raise_faults(); }
  void check() {
    const CallScope scope(*this);
    ahead_.check();
  }
  /// As raise_faults, and also throws if the options are invalid. Runs before every call.
  void check_usable();

 private:
  void open();
  RankStreams::Lane make_lane();
  void leak_memory() noexcept;

  const PathContext& context_;
  int device_;
  DeviceOptions options_;
  RankStreams streams_;
  PeerMemory peers_;
  std::optional<DevicePool> pool_;  // set once memory can be taken
  int64_t shared_memory_;
  Waits waits_;
  ChannelRanks channel_ranks_;
  RunAhead ahead_;
  RankAgreement agreement_;
  Placement placement_;
  std::shared_ptr<const void> tables_;  // placement_ on the device; shape_ points to it
  PlanShape shape_{};                   // without the members that depend on T and K
};

}  // namespace crossdock::cuda
