#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/cuda/peer_signals.cuh"
#include "comm/failure.hpp"
#include "dispatch/call.hpp"
#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/path.hpp"

namespace crossdock::cuda {

/// Memory of this rank that peers use during one call.
struct ExposedMemory {
  size_t entry = 0;             // number of this memory in the call, for reach
  std::byte* data = nullptr;    // the address that peers use
  std::byte* wanted = nullptr;  // the address given to show
  int64_t num_bytes = 0;
  std::shared_ptr<const void> lease;  // keeps a copy alive, if peers cannot reach the memory
};

/// One collective call with tensors on a GPU: prepare, agree, move, in this order. After an
/// agreement a rank only queues work until all ranks have done so: an allocation could wait for
/// kernels that wait for this rank.
///
/// Memory of the call must be released before the call ends, while its stream, and any capture of
/// it, still exist: declare it after the call.
class GpuCall {
 public:
  /// A call that is begun (`begun` is given) is queued in the aside lane, and leaves there what
  /// finish needs. Throws if the group has failed: a late peer may still write memory of the failed
  /// call.
  GpuCall(CudaRank& rank, CallTerms terms, Begun* begun = nullptr);
  /// If a begun call has failed, the caller's stream waits for what was queued.
  ~GpuCall();
  GpuCall(const GpuCall&) = delete;
  GpuCall& operator=(const GpuCall&) = delete;

  /// Checks input, takes memory and shows it to the peers. An exception is this rank's refusal,
  /// which agree turns into the same error on every rank; the group stays usable.
  template <typename Body>
  void prepare(const Body& body) {
    refusal_ = refusal_of([&] {
      enter();
      body();
    });
  }
  bool is_refused() const { return refusal_.has_value(); }

  /// What this rank tells the others besides the terms of the call.
  struct Offer {
    bool needs_barrier = true;  // peers must wait for this rank's stream before they begin
    int64_t num_slots = 0;      // slots per token that this rank's routing needs
    bool must_meet = false;     // on every rank: the result is needed on the host
  };
  /// Collective; see RankAgreement.
  const AgreedCall& agree(const Offer& offer);

  /// Queues the work. An exception poisons the group, because peers may be waiting for this rank.
  template <typename Body>
  void move(const Body& body) {
    EventRecorder& recorder = rank_.group().recorder();
    const EventRecorder::Scope recorded(recorder, agreed_.operation, agreed_.sequence, 0);
    record_copies();
    run_agreed(rank_.group(), [&] {
      body();
      if (is_aside()) begun_->done = mark();
    });
  }

  CudaRank& rank() const { return rank_; }
  const AgreedCall& agreed() const { return agreed_; }
  /// Whether the call runs concurrently with the caller's stream.
  bool is_aside() const { return !rank_.streams().is_main(*lane_); }
  cudaStream_t stream() const { return rank_.streams().stream_of(*lane_); }
  /// Marks the work queued so far; see RankStreams.
  std::shared_ptr<const void> mark() const { return rank_.streams().mark(*lane_); }
  /// Waits for the work queued so far. On a timeout, fails the group and throws.
  void await() const { rank_.streams().await(*lane_); }
  /// SM limit of the call; 0: none.
  int max_sms() const;
  const PeerSignals& signals() const { return lane_->channel->signals(); }
  /// Signals for waits within the node.
  PeerSignals near_signals() const;
  /// Signals for kernels that involve this rank only.
  PeerSignals local_signals() const;

  OwnedTensor take(DType dtype, const Shape& shape) { return rank_.take(dtype, shape, stream()); }
  /// Makes memory available to peers: the memory itself, or a lease if they cannot reach it. All
  /// ranks show the same tensors in the same order, at most kMostShown.
  ExposedMemory show(const void* data, int64_t num_bytes, bool with_contents);
  /// After peers have written: queues the copy from a lease, if any, to the memory shown.
  void fetch(const ExposedMemory& shown) const;
  /// Zeroes the plan's pad rows in rows [R, row_bytes].
  void zero_pads(const CudaPlan& plan, std::byte* rows, int64_t row_bytes) const;

  /// Queues what must precede the use of other ranks' memory.
  void await_peers(Operation operation) const {
    rank_.agreement().await_peers(*lane_, agreed_, operation);
  }
  /// Looks up what every rank has shown as `entry`, for kernels of this rank. REQUIRES: kernels
  /// wait for all ranks.
  template <typename Value>
  void reach(size_t entry, PeerPointers<Value>& pointers) const {
    if (!agreed_.is_queued()) return reach(entry, pointers.known);
    const int own = rank_.group().rank();
    std::byte* const data = rank_.peers().reach(own, agreed_.handles[0][entry]);
    pointers.known[own] = reinterpret_cast<Value*>(data);
    pointers.found = reinterpret_cast<Value* const*>(signals().shown->rows[entry]);
  }
  template <typename Pointer>
  void reach(size_t entry, Pointer (&pointers)[kMaxPeers]) const {
    for (int p = 0; p < rank_.group().size(); ++p) reach_one(entry, p, pointers[p]);
  }
  /// The same by slot, for the ranks of this node only. REQUIRES: kernels wait for them.
  template <typename Pointer>
  void reach_near(size_t entry, Pointer (&pointers)[kMaxPeers]) const {
    for (int p = 0; p < rank_.group().size(); ++p) {
      if (rank_.is_near(p)) reach_one(entry, p, pointers[rank_.channel_ranks().slot_of(p)]);
    }
  }

 private:
  template <typename Pointer>
  void reach_one(size_t entry, int peer, Pointer& pointer) const {
    const MemoryHandle& handle = agreed_.handles[static_cast<size_t>(peer)][entry];
    pointer = reinterpret_cast<Pointer>(rank_.peers().reach(peer, handle));
  }
  void enter();
  bool runs_ahead() const { return rank_.agreement().runs_ahead(*lane_); }
  bool hides(const void* data) const;
  void record_copies() const;

  const CudaRank::CallScope scope_;
  CudaRank& rank_;
  CallTerms terms_;
  Begun* begun_;
  RankStreams::Lane* lane_;
  std::optional<Error> refusal_;
  std::vector<MemoryHandle> shown_;
  AgreedCall agreed_;
  int64_t copied_bytes_ = 0;  // copied because peers cannot reach the caller's memory
};

/// What the GPU paths have in common: the rank, and members that do not depend on how rows travel.
class GpuPath : public Path {
 public:
  void agree_on(const Proposal& proposal) final;
  /// The values travel as the counts of a plan do. If GPUs do not reach each other's memory, the
  /// hosts add them and wait for the GPU, as they do to make plans.
  OwnedTensor all_reduce(const ConstTensorView& values) final;
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) final;
  std::vector<std::shared_ptr<const void>> owners_of(
      std::span<const ConstTensorView> tensors) const final;
  void finish(const std::shared_ptr<const void>& done) final { rank_.streams().finish(done); }
  void set_options(const DeviceOptions& options) final { rank_.set_options(options); }
  void check() final { rank_.check(); }

 protected:
  GpuPath(const PathContext& context, int device, const ChannelUse& use)
      : context_(context), rank_(context_, device, use) {}

  Group& group() const { return context_.group; }
  const DispatchConfig& config() const { return *context_.config; }

  PathContext context_;
  CudaRank rank_;
};

/// Checks the arguments of a dispatch on a GPU.
void check_dispatch(const CudaRank& rank, const Plan& plan, const DispatchArgs& args,
                    const Begun* begun);

/// Kernel arguments that do not depend on where the rows are.
GatherSumKernelArgs sum_args(const char* operation, const Plan& plan, const GatherSumArgs& args,
                             const TensorView& out);

}  // namespace crossdock::cuda
