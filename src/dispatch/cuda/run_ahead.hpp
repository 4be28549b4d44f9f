#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/cuda/peer_calls.cuh"
#include "comm/cuda/peer_memory.hpp"
#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "dispatch/cuda/channel_ranks.hpp"
#include "dispatch/cuda/rank_streams.hpp"
#include "dispatch/path.hpp"

namespace crossdock::cuda {

/// A call as the ranks compare it.
struct CallText {
  const char* operation = "";
  uint64_t subject = 0;  // number of the plan; 0: none yet
  std::string config{};  // must be identical on every rank
};

/// The last calls that this rank has queued without meeting the other hosts. If the devices detect
/// that calls differ, the log says what they were.
class CallLog {
 public:
  /// Returns the number of the call, from 1.
  uint32_t add(const CallText& call);
  /// The call with this number; null if it is no longer kept.
  const CallText* find(uint32_t number) const;

 private:
  // More than a stream holds: a launch waits if about 1000 launches are pending.
  static constexpr size_t kMostCalls = 1024;

  std::vector<CallText> calls_;  // call n is at (n - 1) % kMostCalls
  uint32_t last_ = 0;
};

/// A hash of the call for QueuedCall.
uint32_t hash_of_call(const CallText& call);

/// What a rank knows about the call at which all ranks' devices were halted.
struct CallAccount {
  CallText call{};
  std::optional<Error> refusal{};  // why this rank refused it
};

/// The hosts meet and find out why their devices were halted. Returns the same error on every rank:
/// the one that Group::agree would have thrown had the hosts met in that call. A rank has no
/// account if its device was halted because another rank stopped; if no rank has one, the error is
/// kInternal. Collective.
Error explain_halt(Group& group, const std::optional<CallAccount>& own);

/// What one dispatcher of this rank queues without meeting the other hosts, and what the devices
/// report about it.
///
/// A rank only queues its calls: its kernels tell the peers what it has queued, and nothing moves
/// on any rank if the calls differ or a rank refuses. The hosts find out in a later call, meet, and
/// throw the same error.
///
/// Ranks run ahead in this way if they are processes, the configuration has max_rows, and the call
/// is not being captured. Threads of one process do not: while a rank's kernels wait for another
/// rank on the same GPU, many of the other rank's CUDA calls would wait for those kernels.
class RunAhead {
 public:
  /// The parts of its rank that it uses; they must outlive it.
  struct Parts {
    const PathContext& context;
    int device;
    RankStreams& streams;
    const ChannelRanks& channel_ranks;
    bool is_allowed;  // see ChannelUse
  };
  explicit RunAhead(const Parts& parts);
  ~RunAhead();
  RunAhead(const RunAhead&) = delete;
  RunAhead& operator=(const RunAhead&) = delete;

  const Parts& parts() const { return parts_; }
  /// Whether calls may run ahead once the ranks are connected. Identical on every rank.
  bool is_enabled() const { return siblings_ != nullptr; }
  /// The ranks of a channel have been connected. num_sharing: see CudaRank.
  void note_peers(const PeerBases& bases, int num_sharing) {
    bases_ = bases;
    num_sharing_ = num_sharing;
  }
  const PeerBases& bases() const { return bases_; }
  int num_sharing() const { return num_sharing_; }

  /// The number of a call in which the hosts do not meet, identical on every rank.
  uint64_t next_sequence();
  /// The hosts have met in a call with this number.
  void note_meeting(uint64_t sequence);

  /// Logs a call that shows this memory; returns what this rank tells its peers.
  QueuedCall queue(const CallText& call, const std::vector<MemoryHandle>& shown);
  /// This rank refuses a call instead of queueing it. Collective; throws the same error on all
  /// ranks.
  [[noreturn]] void refuse(const RankStreams::Lane& lane, CallText call, const Error& refusal);
  /// After a meeting that failed on all ranks with this error. If devices are halted, ends that and
  /// throws why they were.
  void explain(const RankStreams::Lane& lane, const Error& error);

  /// Throws if the devices have recorded a fault (fatal ones first) or the watch has found an
  /// error. Does not wait.
  void raise_faults();
  /// The same outside a call. If the devices are halted, the hosts meet. Call it inside a
  /// CallScope.
  void check();

  /// Tells the peers that this rank makes no further calls. Never throws.
  void say_farewell() noexcept;
  /// Memory that peers may write at any time after this rank has left: their farewells.
  std::vector<std::shared_ptr<const void>> late_mailboxes() const;

 private:
  /// One rank's dispatchers in a group that run ahead, in the same order on all ranks. If a call of
  /// one of them halts the devices, all of them stop until the hosts have met: kernels of several
  /// dispatchers may wait in one stream, and a rank that has found an error calls none of them.
  using Siblings = std::vector<RunAhead*>;
  static std::shared_ptr<Siblings> siblings_in(Group& group);
  /// The same, but null if the group has no dispatcher that runs ahead.
  static std::shared_ptr<Siblings> find_siblings(Group& group);

  Group& group() const { return parts_.context.group; }
  std::vector<RankStreams::Lane*> connected_lanes() const;
  bool is_halted() const;
  [[noreturn]] void raise(const RankStreams::Lane& lane, Fault fault);
  Error error_of(const RankStreams::Lane& lane, Fault fault) const;
  void clear_reported_faults(const RankStreams::Lane& lane);

  /// For a rank whose devices are halted, or that refuses a call in lane `refusing`. All ranks call
  /// it, each from the call in which it notices, perhaps one of a dispatcher that never runs ahead.
  /// Meets the other hosts, resumes, and throws the same error on all ranks.
  [[noreturn]] void recover(const RankStreams::Lane* refusing = nullptr,
                            const std::optional<CallAccount>& refused = std::nullopt);
  /// Tells the peers that this rank queues no further calls, so that their kernels do not wait for
  /// them. refusing: the lane of call `number`, which this rank refuses; null: none.
  void stop(const RankStreams::Lane* refusing, uint32_t number, Operation operation);
  /// Waits until the queued work is done. Throws if the group has failed.
  void await_stop();
  /// What this rank knows about the first halted call, if any. own: this rank's refusal of call
  /// own_number.
  std::optional<CallAccount> account(const std::optional<CallAccount>& own,
                                     uint32_t own_number) const;
  /// Allows calls to be queued again. REQUIRES: await_stop has returned on all ranks. sequence:
  /// number of the meeting.
  void resume(uint64_t sequence);

  Parts parts_;
  std::shared_ptr<Siblings> siblings_;  // this one included; null if it never runs ahead
  CallLog log_;
  uint64_t last_meeting_ = 0;  // its sequence number
  uint64_t num_calls_ = 0;     // calls since then, without a meeting
  PeerBases bases_{};
  int num_sharing_ = 1;
};

}  // namespace crossdock::cuda
