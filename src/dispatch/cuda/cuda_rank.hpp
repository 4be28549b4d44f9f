#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda/peer_channel.hpp"
#include "comm/cuda/peer_memory.hpp"
#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/callers_stream.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"
#include "core/cuda/stream.hpp"
#include "dispatch/cuda/channel_ranks.hpp"
#include "dispatch/path.hpp"
#include "plan/cuda/cuda_plan.hpp"
#include "plan/placement.hpp"

namespace crossdock::cuda {

/// Memory of this rank that peers use during one call.
struct ShownMemory {
  MemoryHandle handle{};
  std::byte* data = nullptr;    // where it is while they do
  std::byte* wanted = nullptr;  // where it was shown
  int64_t num_bytes = 0;
  std::shared_ptr<const void> lease;  // of a copy that stands in for memory out of their reach
};

/// One rank's side of a dispatcher on a GPU: its memory, its signals, and how it agrees with the
/// others.
class CudaRank {
 public:
  /// The context must outlive it.
  CudaRank(const PathContext& context, int device, const ChannelUse& use);
  /// Waits for this rank's streams, since they use what it owns, but not longer than the deadlines:
  /// what is in use then is never freed, and the group fails.
  ~CudaRank();
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  /// Surrounds every call. If the caller's stream is the calling thread's own, what the thread
  /// queues there afterwards comes after the call.
  class CallScope {
   public:
    explicit CallScope(const CudaRank& rank) : guard_(rank.device()), callers_(rank.callers_) {}
    ~CallScope() { callers_.lead_thread(); }
    CallScope(const CallScope&) = delete;
    CallScope& operator=(const CallScope&) = delete;

   private:
    CallGuard guard_;
    const CallersStream& callers_;
  };
  /// In that case the call comes after what the thread has queued there. Inside a CallScope, before
  /// anything that depends on the stream.
  void follow_caller() const { callers_.follow_thread(); }

  const PathContext& context() const { return context_; }
  const DispatchConfig& config() const { return *context_.config; }
  Group& group() const { return context_.group; }
  int device() const { return device_; }
  Device where() const { return {.kind = DeviceKind::kCuda, .index = device_}; }
  /// Another stream than before waits for what this rank has in that one.
  void set_options(const DeviceOptions& options);
  cudaStream_t stream() const;
  StreamWatch& watch() const { return *watch_; }
  /// Waits for stream(). If it does not end in time, the group fails and throws.
  void await_stream() const { await(stream()); }
  int max_sms() const { return options_.max_sms; }
  /// Ranks of this process on this GPU, this one included.
  int num_sharing() const { return num_sharing_; }
  DevicePool& pool() { return pool_; }
  const PeerSignals& signals() const { return lane().channel->signals(); }
  /// The same for waits within the node.
  PeerSignals near_signals() const;
  /// The same for kernels that work for this rank alone.
  PeerSignals signals_alone() const;
  bool is_near(int peer) const { return peers_.is_near(peer); }
  /// The ranks of this rank's channels. Targets in kernels that wait are slots among them.
  const ChannelRanks& channel_ranks() const { return channel_ranks_; }

  /// Work is queued in a stream of its own, with signals of its own, until end_aside (see
  /// Path).
  void begin_aside();
  std::shared_ptr<const void> end_aside();
  void finish(const std::shared_ptr<const void>& done) const;

  const Placement& placement() const { return placement_; }
  /// What plans of T tokens are made of.
  CudaPlanInputs plan_inputs(int64_t T) const;

  // Tensors. The checks throw Error(kInvalidArgument) that names the tensor.
  void check_device(const char* name, const ConstTensorView& tensor) const;
  void check_tensor(const char* name, const ConstTensorView& tensor, const Shape& shape) const;
  OwnedTensor take(DType dtype, const Shape& shape);
  OwnedTensor output_or_new(const char* name, const TensorView& given, DType dtype,
                            const Shape& shape);
  /// Zeroes the plan's pad rows in rows [R, row_bytes].
  void zero_pads(const CudaPlan& plan, std::byte* rows, int64_t row_bytes) const;

  /// What this rank brings to the agreement on a call.
  struct Proposal {
    const char* operation;
    uint64_t subject;                   // number of the plan; 0: there is none yet
    std::string call_text;              // must be identical on every rank
    std::vector<MemoryHandle> handles;  // memory that peers use
    bool needs_barrier = true;          // peers must wait for this rank's stream before they begin
    const Error* refusal = nullptr;     // what this rank found wrong
  };
  /// What all ranks brought.
  struct Agreed {
    const char* operation = "";
    uint64_t sequence = 0;
    bool needs_barrier = false;                      // any rank's
    bool has_waiting_room = true;                    // every rank's, for kernels on max_sms
    std::vector<std::vector<MemoryHandle>> handles;  // [P]
  };
  /// Collective. Throws the same error on all ranks if one refuses. The first time it also connects
  /// the ranks' signals.
  Agreed agree(Proposal proposal);

  /// For peers to use: memory itself, or a lease in its place where they cannot reach it.
  ShownMemory show(const void* data, int64_t num_bytes, bool with_contents);
  /// Bytes of such leases since it was last asked.
  int64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }
  /// Entry `entry` of every rank's handles, for kernels of this rank. REQUIRES: kernels wait for
  /// all ranks.
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
  /// After peers have written: what is in a lease goes where it was wanted.
  void fetch(const ShownMemory& shown) const;

  /// Throws what the device has reported, if anything, a fatal fault first, or what the watch has
  /// found. Does not wait.
  void raise_faults();
  /// The same, or what is wrong with the options: ahead of every call.
  void check_usable();

 private:
  /// What kernels that run one after the other share.
  struct Lane {
    std::shared_ptr<PeerChannel> channel;
    bool is_connected = false;                  // or need not be
    std::shared_ptr<const OwnedStream> stream;  // null: the caller's
  };

  template <typename Pointer>
  void reach_one(const Agreed& agreed, size_t entry, int peer, Pointer& pointer) {
    const MemoryHandle& handle = agreed.handles[static_cast<size_t>(peer)][entry];
    pointer = reinterpret_cast<Pointer>(peers_.reach(peer, handle));
  }
  Lane make_lane();
  [[noreturn]] void raise(const Lane& lane, Fault fault);
  Lane& lane() { return is_aside_ ? *aside_ : main_; }
  const Lane& lane() const { return is_aside_ ? *aside_ : main_; }
  std::vector<Lane*> lanes();
  cudaStream_t callers_stream() const { return callers_.get(); }
  /// The stream of the options, or cudaStreamPerThread.
  cudaStream_t wanted_stream(const DeviceOptions& options) const;
  void await(cudaStream_t stream) const;
  bool ends_in_time(const Lane& lane) noexcept;
  void keep_memory_for_ever() noexcept;
  bool has_waiting_room();
  void connect(const char* operation, uint64_t subject, const Agreed& agreed);

  const PathContext& context_;
  int device_;
  DeviceOptions options_;
  CallersStream callers_;
  PeerMemory peers_;
  DevicePool pool_;
  std::shared_ptr<StreamWatch> watch_;
  Waits waits_;
  ChannelRanks channel_ranks_;
  Lane main_;
  std::optional<Lane> aside_;  // made when first needed
  bool is_aside_ = false;
  int64_t copied_bytes_ = 0;
  bool has_queued_ = false;  // into the caller's stream
  // By stream and multiprocessors; null where there was none.
  std::map<std::pair<uint64_t, int>, std::shared_ptr<const void>> waiting_rooms_;
  int num_sharing_ = 1;  // ranks of this process on this GPU
  Placement placement_;
  std::shared_ptr<const void> tables_;  // placement_ on the device, what shape_ points to
  PlanShape shape_{};                   // without what depends on T
};

}  // namespace crossdock::cuda
