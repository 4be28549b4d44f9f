#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/recorder.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

namespace comm {
class PeerEvents;
class WindowPool;
}  // namespace comm

struct GroupOptions {
  /// For a peer to arrive at an operation. Unset: CROSSDOCK_ARRIVAL_DEADLINE (seconds), else 600 s.
  std::optional<std::chrono::nanoseconds> arrival_deadline{};
  /// Without progress once data moves. Unset: CROSSDOCK_PROGRESS_DEADLINE (seconds), else 30 s.
  std::optional<std::chrono::nanoseconds> progress_deadline{};
  /// Last events remembered (see EventRecorder); 0 turns the recorder off.
  int64_t recorded_events = 256;
  /// Where the last events go when the group fails: one line of JSON per rank, appended to this
  /// file. That of a culprit who cannot write any more is written by a rank of its node. Empty:
  /// CROSSDOCK_REPORT, else nowhere.
  std::string report_file{};
  /// Rows on their way between nodes take at most this much memory at a time, once for sending and
  /// once for receiving, however many tokens there are and wherever they go (but one token of every
  /// rank always goes). Not more than the engine can have in flight. The same on all ranks.
  int64_t staging_bytes = int64_t{64} << 20;
  /// That move and sum rows. Not given: the process's pool, which ranks that are threads share;
  /// ranks that are processes have as many threads each as there are cores for a rank of the node.
  std::shared_ptr<ThreadPool> threads{};
};

/// What this rank brings to a rendezvous.
struct Proposal {
  const char* operation = "";  // a string literal of at most 23 characters: "plan", "dispatch", ...
  uint64_t subject = 0;        // which object it is about: the number of the plan; 0 if none
  /// What must be alike on all ranks, as "key=value;key=value": a difference becomes an error that
  /// names the key, both values and the rank.
  std::string config{};
  /// What the other ranks get if everybody agrees; any size.
  std::span<const std::byte> body{};
  /// All ranks are inside the operation already (they met for it before): the progress deadline
  /// holds, not the one for arrival.
  bool under_way = false;
  /// Set: this rank refuses, and every rank throws this error, prefixed with this rank's number.
  const Error* rejection = nullptr;
};

/// What all ranks brought, if all agreed.
struct Agreement {
  uint64_t sequence = 0;         // number of this rendezvous; the same on all ranks
  Buffer bytes;                  // the bodies of all ranks, one after the other
  std::vector<int64_t> offsets;  // [P + 1]

  std::span<const std::byte> body(int rank) const;
};

/// Memory that one rank's group holds, in use or kept for later, in bytes.
struct GroupMemory {
  int64_t pool_bytes = 0;
  int64_t window_bytes = 0;  // that the other ranks of its node reach
};

/// The P ranks that exchange rows, seen from one of them: a communicator made safe.
///
/// Every collective begins with agree(), a numbered rendezvous, so that a bad input, a different
/// configuration or a rank at another call is the same error on all ranks before anything moved,
/// and the group stays usable. A rank that does not come, fails or leaves is an error that names
/// it; the group is then poisoned: every later call throws that error, until a new group is made of
/// the survivors with subgroup(). Used by one thread at a time, by any thread. The destructor is
/// not collective; it tells the peers that this rank has left.
class Group {
 public:
  explicit Group(std::unique_ptr<Communicator> communicator, GroupOptions options = {});
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->size(); }
  const Topology& topology() const { return communicator_->topology(); }
  Communicator& communicator() { return *communicator_; }
  const GroupOptions& options() const { return options_; }  // defaults filled in

  EventRecorder& recorder() { return recorder_; }
  BufferPool& pool() { return pool_; }
  const std::shared_ptr<ThreadPool>& threads() const { return options_.threads; }
  /// Memory that the ranks of this node reach (for strategies inside the library).
  comm::WindowPool& windows() { return *windows_; }
  /// The events of the other ranks of this node (for the flight report).
  comm::PeerEvents& peer_events() { return *peer_events_; }
  GroupMemory memory() const;

  /// Throws the error that poisoned this group, if any.
  void check() const;
  bool is_poisoned() const { return poison_.has_value(); }

  /// The rendezvous. Collective. Throws the same Error on all ranks if any rank refuses
  /// (kInvalidArgument or what it refused with), is configured differently or is elsewhere
  /// (kMismatch).
  Agreement agree(const Proposal& proposal);

  /// Deadlines and names for an exchange that belongs to the rendezvous `sequence`.
  WaitContext wait_context(const char* operation, uint64_t sequence) const;

  /// The communicator's exchanges, with failures recorded in this group.
  void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                    std::span<const int64_t> recv_offsets, const WaitContext& wait);
  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait);

  /// Poisons the group and tells the peers. For failures after an agreement, when peers may already
  /// be waiting for this rank's data. An error without a call gets that of the last rendezvous.
  /// Does nothing if the group is poisoned already.
  void fail(const Error& cause) noexcept;

  /// Says goodbye with a reason; called by the destructor with a plain one.
  void leave(std::string_view reason) noexcept;

  /// A group of `members` (ranks of this one, ascending, this rank among them), with these options.
  /// Called by the members only, also on a poisoned group.
  std::unique_ptr<Group> subgroup(std::span<const int> members);

 private:
  std::unique_ptr<Communicator> communicator_;
  GroupOptions options_;
  EventRecorder recorder_;
  BufferPool pool_;
  std::unique_ptr<comm::WindowPool> windows_;
  std::unique_ptr<comm::PeerEvents> peer_events_;
  uint64_t next_sequence_ = 1;
  const char* last_operation_ = "";  // of the last rendezvous, number next_sequence_ - 1
  std::optional<Error> poison_;
};

}  // namespace crossdock
