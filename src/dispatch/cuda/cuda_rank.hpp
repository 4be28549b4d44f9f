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
#include "comm/cuda/peer_pointers.hpp"
#include "core/cuda/device_pool.hpp"
#include "dispatch/cuda/channel_ranks.hpp"
#include "dispatch/cuda/rank_agreement.hpp"
#include "dispatch/cuda/rank_streams.hpp"
#include "dispatch/path.hpp"
#include "plan/cuda/cuda_plan.hpp"
#include "plan/placement.hpp"

namespace crossdock::cuda {

/// Memory of this rank that peers use during one call.
struct ExposedMemory {
  MemoryHandle handle{};
  std::byte* data = nullptr;    // the address that peers use
  std::byte* wanted = nullptr;  // the address given to show
  int64_t num_bytes = 0;
  std::shared_ptr<const void> lease;  // keeps a copy alive, if peers cannot reach the memory
};

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
  void meet();

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
  cudaStream_t stream() const { return streams_.stream(); }
  StreamWatch& watch() const { return *streams_.watch(); }
  /// Waits for stream(). On a timeout, fails the group and throws.
  void await_stream() const { streams_.await(); }
  /// SM limit of the current call; 0: none.
  int max_sms() const {
    const bool has_own_limit = streams_.is_aside() && options_.max_begun_sms > 0;
    return has_own_limit ? options_.max_begun_sms : options_.max_sms;
  }
  /// Ranks of this process on this GPU, this one included.
  int num_sharing() const { return agreement_.num_sharing(); }
  DevicePool& pool() { return *pool_; }
  const PeerSignals& signals() const { return streams_.lane().channel->signals(); }
  /// Signals for waits within the node.
  PeerSignals near_signals() const;
  /// Signals for kernels that involve this rank only.
  PeerSignals local_signals() const;
  bool is_near(int peer) const { return peers_.is_near(peer); }
  /// The ranks of this rank's channels. Targets in kernels that wait are slots among them.
  const ChannelRanks& channel_ranks() const { return channel_ranks_; }

  const Placement& placement() const { return placement_; }
  /// The inputs for plans of T tokens with K slots each.
  CudaPlanInputs plan_inputs(int64_t T, int64_t K) const;

  // Tensors. The checks throw an Error(kInvalidArgument) that names the tensor.
  void check_device(const char* name, const ConstTensorView& tensor) const;
  void check_tensor(const char* name, const ConstTensorView& tensor, const Shape& shape) const;
  OwnedTensor take(DType dtype, const Shape& shape);
  OwnedTensor output_or_new(const char* name, const TensorView& given, DType dtype,
                            const Shape& shape);
  /// Memory that the kernels of the current lane use in turn; contents are unspecified.
  std::byte* scratch(int64_t num_bytes);
  /// Zeroes the plan's pad rows in rows [R, row_bytes].
  void zero_pads(const CudaPlan& plan, std::byte* rows, int64_t row_bytes) const;

  using Agreed = AgreedCall;
  /// Collective; see RankAgreement.
  Agreed agree(CallProposal proposal) { return agreement_.agree(std::move(proposal), max_sms()); }
  /// Whether the next call only queues, without meeting the other hosts.
  bool runs_ahead() const { return agreement_.runs_ahead(); }
  /// Queues what must precede the use of other ranks' memory.
  void await_peers(const Agreed& agreed, Operation operation) const {
    agreement_.await_peers(agreed, operation);
  }

  /// Makes memory available to peers: the memory itself, or a lease if they cannot reach it.
  ExposedMemory show(const void* data, int64_t num_bytes, bool with_contents);
  /// Bytes of such leases since the last call of this function.
  int64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }
  /// Looks up entry `entry` of every rank's handles, for kernels of this rank. REQUIRES: kernels
  /// wait for all ranks.
  template <typename Value>
  void reach(const Agreed& agreed, size_t entry, PeerPointers<Value>& pointers) {
    if (!agreed.is_queued()) return reach(agreed, entry, pointers.known);
    const int own = group().rank();
    std::byte* const data = peers_.reach(own, agreed.handles[0][entry]);
    pointers.known[own] = reinterpret_cast<Value*>(data);
    pointers.found = reinterpret_cast<Value* const*>(signals().shown->rows[entry]);
  }
  template <typename Pointer>
  void reach(const Agreed& agreed, size_t entry, Pointer (&pointers)[kMaxPeers]) {
    for (int p = 0; p < group().size(); ++p) reach_one(agreed, entry, p, pointers[p]);
  }
  /// The same by slot, for the ranks of this node only. REQUIRES: kernels wait for them.
  template <typename Pointer>
  void reach_near(const Agreed& agreed, size_t entry, Pointer (&pointers)[kMaxPeers]) {
    for (int p = 0; p < group().size(); ++p) {
      if (is_near(p)) reach_one(agreed, entry, p, pointers[channel_ranks_.slot_of(p)]);
    }
  }
  /// After peers have written: queues the copy from a lease, if any, to the memory shown.
  void fetch(const ExposedMemory& shown) const;

  /// See RankAgreement.
  void raise_faults() { agreement_.raise_faults(); }
  void check() {
    const CallScope scope(*this);
    agreement_.check();
  }
  /// As raise_faults, and also throws if the options are invalid. Runs before every call.
  void check_usable();

 private:
  template <typename Pointer>
  void reach_one(const Agreed& agreed, size_t entry, int peer, Pointer& pointer) {
    const MemoryHandle& handle = agreed.handles[static_cast<size_t>(peer)][entry];
    pointer = reinterpret_cast<Pointer>(peers_.reach(peer, handle));
  }
  void open();
  bool hides(const void* data) const;
  RankStreams::Lane make_lane();
  void leak_memory() noexcept;

  const PathContext& context_;
  int device_;
  DeviceOptions options_;
  RankStreams streams_;
  PeerMemory peers_;
  std::optional<DevicePool> pool_;  // set once memory can be taken
  Waits waits_;
  ChannelRanks channel_ranks_;
  int64_t copied_bytes_ = 0;
  RankAgreement agreement_;
  Placement placement_;
  std::shared_ptr<const void> tables_;  // placement_ on the device; shape_ points to it
  PlanShape shape_{};                   // without the members that depend on T and K
};

}  // namespace crossdock::cuda
