#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda/peer_calls.cuh"
#include "comm/cuda/peer_channel.hpp"
#include "comm/cuda/peer_memory.hpp"
#include "dispatch/cuda/channel_ranks.hpp"
#include "dispatch/cuda/rank_streams.hpp"
#include "dispatch/cuda/run_ahead.hpp"
#include "dispatch/path.hpp"

namespace crossdock::cuda {

/// Ends the waits of this rank's kernels when a peer's process has ended, because the host may be
/// waiting for the stream of those kernels. Thread-safe.
class LostPeers {
 public:
  /// Adds a channel whose waits must end.
  void add(std::shared_ptr<PeerChannel> channel) {
    const std::lock_guard lock(mutex_);
    if (lost_) channel->abandon(lost_);
    channels_.push_back(std::move(channel));
  }

  /// The process of the peer in this slot has ended.
  void note(int slot) {
    const std::lock_guard lock(mutex_);
    if (!lost_) lost_ = slot;
    for (const std::shared_ptr<PeerChannel>& channel : channels_) channel->abandon(lost_);
  }

  /// Keeps the registration that calls note; see PeerMemory::watch_owners.
  void set_watch(std::shared_ptr<const void> watch) { watch_ = std::move(watch); }

 private:
  std::mutex mutex_;
  std::optional<int> lost_;
  std::vector<std::shared_ptr<PeerChannel>> channels_;
  std::shared_ptr<const void> watch_;  // destroyed first
};

/// A rank's part in the agreement on a call.
struct CallProposal {
  RankStreams::Lane& lane;  // in which the call is queued
  const char* operation;
  uint64_t subject;                   // number of the plan; 0: none yet
  std::string call_text;              // must be identical on every rank
  std::vector<MemoryHandle> handles;  // memory that peers use, at most kMostShown
  bool needs_barrier = true;          // peers must wait for this rank's stream before they begin
  int64_t num_slots = 0;              // slots per token that this rank's routing needs
  bool must_meet = false;             // on every rank: the result is needed on the host
  const Error* refusal = nullptr;     // why this rank refuses, if it does
};

/// The combined proposals of all ranks.
struct AgreedCall {
  const char* operation = "";
  uint64_t sequence = 0;                           // number of the call, identical on every rank
  bool needs_barrier = false;                      // on any rank
  int64_t num_slots = 0;                           // the maximum over all ranks
  bool has_waiting_room = false;                   // on every rank, for kernels on max_sms
  QueuedCall queued{};                             // if it has a number, the hosts have not met
  std::vector<std::vector<MemoryHandle>> handles;  // [P]; if the hosts have not met, this rank's

  bool is_queued() const { return queued.number != 0; }
};

/// How one rank agrees with the others on the calls of a dispatcher.
///
/// Either the hosts meet (Group::agree), or a rank only queues: its kernels tell the peers what it
/// has queued, and nothing moves on any rank if the calls differ or a rank refuses. The hosts find
/// out in a later call, meet, and throw the same error.
///
/// Ranks run ahead in this way if they are processes, the configuration has max_rows, and the call
/// is not being captured. Threads of one process do not: while a rank's kernels wait for another
/// rank on the same GPU, many of the other rank's CUDA calls would wait for those kernels.
class RankAgreement {
 public:
  /// The parts of its rank that it uses; they must outlive it.
  struct Parts {
    const PathContext& context;
    int device;
    RankStreams& streams;
    PeerMemory& peers;
    const ChannelRanks& channel_ranks;
    bool may_run_ahead;  // see ChannelUse
  };
  explicit RankAgreement(const Parts& parts);
  ~RankAgreement();
  RankAgreement(const RankAgreement&) = delete;
  RankAgreement& operator=(const RankAgreement&) = delete;

  /// Collective. Throws the same error on all ranks if one refuses, now or, if the hosts do not
  /// meet, in a later call. The first time in a lane it also connects the ranks' signals. max_sms:
  /// SM limit of kernels that wait for their peers; 0: none.
  AgreedCall agree(CallProposal proposal, int max_sms);
  /// Whether the next call in the lane only queues. Identical on every rank.
  bool runs_ahead(const RankStreams::Lane& lane) const;

  /// Queues what must precede the use of other ranks' memory: a barrier, or the exchange of calls
  /// that replaces it.
  void await_peers(const RankStreams::Lane& lane, const AgreedCall& agreed,
                   Operation operation) const;

  /// Throws if the devices have recorded a fault (fatal ones first) or the watch has found an
  /// error. Does not wait.
  void raise_faults();
  /// The same outside a call. If the devices are halted, the hosts meet. Call it inside a
  /// CallScope.
  void check();

  /// Ranks of this process on this GPU, this one included.
  int num_sharing() const { return num_sharing_; }
  /// Tells the peers that this rank makes no further calls. Never throws.
  void say_farewell() noexcept;
  /// Objects that must outlive kernels that never end.
  std::vector<std::shared_ptr<const void>> reservations() const;
  /// Memory that peers may write at any time after this rank has left: their farewells.
  std::vector<std::shared_ptr<const void>> late_mailboxes() const;

  // How a halt ends; for Recovery.

  /// Notes a call that this rank refuses; returns its number.
  uint32_t note_refused(const CallText& call);
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

 private:
  Group& group() const { return parts_.context.group; }
  bool is_alone() const { return group().size() == 1; }
  AgreedCall agree_alone(CallProposal proposal, int max_sms);
  AgreedCall agree_ahead(CallProposal proposal, int max_sms);
  AgreedCall meet_hosts(CallProposal proposal, int max_sms);
  void connect(const CallProposal& proposal, const AgreedCall& agreed);
  bool has_waiting_room(const RankStreams::Lane& lane, int max_sms);
  std::vector<RankStreams::Lane*> connected_lanes() const;

  [[noreturn]] void raise(const RankStreams::Lane& lane, Fault fault);
  Error error_of(const RankStreams::Lane& lane, Fault fault) const;
  bool is_halted() const;

  void clear_reported_faults(const RankStreams::Lane& lane);

  Parts parts_;
  bool may_run_ahead_;
  std::shared_ptr<Recovery> recovery_;  // null if it never runs ahead
  CallLog log_;
  uint64_t last_meeting_ = 0;  // its sequence number
  uint64_t num_calls_ = 0;     // calls since then, without a meeting
  PeerBases bases_{};
  int num_sharing_ = 1;
  // By stream and number of SMs; null if there was no room.
  std::map<std::pair<uint64_t, int>, std::shared_ptr<const void>> waiting_rooms_;
  LostPeers lost_peers_;  // last: its thread uses the other members
};

}  // namespace crossdock::cuda
