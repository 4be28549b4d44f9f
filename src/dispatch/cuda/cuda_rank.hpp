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
#include "core/cuda/device_pool.hpp"
#include "dispatch/cuda/channel_ranks.hpp"
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
  /// Waits for this rank's streams, since they use what it owns, but not longer than the deadlines:
  /// memory still in use then is never freed, and the group fails.
  ~CudaRank();
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  /// Begins every plan: if the ranks are processes, they agree on how they share memory, once.
  /// Collective; before it, the rank has no memory and no lanes. Throws the same error on all ranks
  /// if it fails.
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
  /// The streams for all work of a call and for the waits for it.
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
  int num_sharing() const { return num_sharing_; }
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

  // Tensors. The checks throw Error(kInvalidArgument) that names the tensor.
  void check_device(const char* name, const ConstTensorView& tensor) const;
  void check_tensor(const char* name, const ConstTensorView& tensor, const Shape& shape) const;
  OwnedTensor take(DType dtype, const Shape& shape);
  OwnedTensor output_or_new(const char* name, const TensorView& given, DType dtype,
                            const Shape& shape);
  /// Zeroes the plan's pad rows in rows [R, row_bytes].
  void zero_pads(const CudaPlan& plan, std::byte* rows, int64_t row_bytes) const;

  /// This rank's part in the agreement on a call.
  struct Proposal {
    const char* operation;
    uint64_t subject;                   // number of the plan; 0: there is none yet
    std::string call_text;              // must be identical on every rank
    std::vector<MemoryHandle> handles;  // memory that peers use
    bool needs_barrier = true;          // peers must wait for this rank's stream before they begin
    int64_t num_slots = 0;              // slots per token that this rank's routing needs
    const Error* refusal = nullptr;     // why this rank refuses, if it does
  };
  /// The combined proposals of all ranks.
  struct Agreed {
    const char* operation = "";
    uint64_t sequence = 0;
    bool needs_barrier = false;                      // on any rank
    int64_t num_slots = 0;                           // the largest of any rank
    bool has_waiting_room = true;                    // on every rank, for kernels on max_sms
    std::vector<std::vector<MemoryHandle>> handles;  // [P]
  };
  /// Collective. Throws the same error on all ranks if one refuses. The first time it also connects
  /// the ranks' signals.
  Agreed agree(Proposal proposal);

  /// Makes memory available to peers: itself, or a lease in its place if they cannot reach it.
  ExposedMemory show(const void* data, int64_t num_bytes, bool with_contents);
  /// Bytes of such leases since the last call.
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
  /// After peers have written: queues the copy from a lease, if any, to the memory shown.
  void fetch(const ExposedMemory& shown) const;

  /// Throws a fault that the device has reported, fatal ones first, or an error that the watch has
  /// found, if any. Does not wait.
  void raise_faults();
  /// As raise_faults, and also throws if the options are invalid. Runs before every call.
  void check_usable();

 private:
  template <typename Pointer>
  void reach_one(const Agreed& agreed, size_t entry, int peer, Pointer& pointer) {
    const MemoryHandle& handle = agreed.handles[static_cast<size_t>(peer)][entry];
    pointer = reinterpret_cast<Pointer>(peers_.reach(peer, handle));
  }
  void open();
  RankStreams::Lane make_lane();
  [[noreturn]] void raise(const RankStreams::Lane& lane, Fault fault);
  void leak_memory() noexcept;
  bool has_waiting_room();
  void connect(const char* operation, uint64_t subject, const Agreed& agreed);

  const PathContext& context_;
  int device_;
  DeviceOptions options_;
  RankStreams streams_;
  PeerMemory peers_;
  std::optional<DevicePool> pool_;  // once memory can be taken
  Waits waits_;
  ChannelRanks channel_ranks_;
  int64_t copied_bytes_ = 0;
  // By stream and number of SMs; null if there was no room.
  std::map<std::pair<uint64_t, int>, std::shared_ptr<const void>> waiting_rooms_;
  int num_sharing_ = 1;  // ranks of this process on this GPU
  Placement placement_;
  std::shared_ptr<const void> tables_;  // placement_ on the device; shape_ points to it
  PlanShape shape_{};                   // without the members that depend on T and K
};

}  // namespace crossdock::cuda
