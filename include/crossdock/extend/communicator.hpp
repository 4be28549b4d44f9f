#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/error.hpp"

namespace crossdock {

/// Which ranks share a node, i.e. can reach each other's memory.
struct CROSSDOCK_API Topology {
  std::vector<int> node_of_rank;  // [P], nodes numbered from 0 in the order of their lowest ranks
  int num_nodes = 0;

  static Topology single_node(int size);
  /// Rank r is on node r / ranks_per_node.
  static Topology uniform(int size, int ranks_per_node);
  /// Ranks with equal entries of `node_ids` [P] share a node; the ids may be any numbers.
  static Topology from_node_ids(std::span<const int> node_ids);
  /// The topology of a subgroup; `members` are ranks of this one.
  Topology subset(std::span<const int> members) const;
  std::vector<int> ranks_of_node(int node) const;  // ascending
};

/// Memory passed to a communicator. `owner` keeps it alive: a request that is still pending after a
/// failed wait may refer to the memory, and the communicator then holds the owner until nothing can
/// touch the memory anymore. REQUIRES: owner is set if num_bytes > 0.
struct SharedBytes {
  std::byte* data = nullptr;
  int64_t num_bytes = 0;
  std::shared_ptr<const void> owner;
};

/// A wait for other ranks that takes long.
struct CROSSDOCK_API WaitNotice {
  int rank = 0;              // the rank that waits
  int size = 1;              // P
  std::vector<int> awaited;  // the ranks it waits for, ascending; empty: not known
  std::string operation;     // "dispatch", ...; "set-up" while a communicator is made
  uint64_t sequence = 0;     // number of the collective in its group; 0 in set-up
  std::chrono::nanoseconds waited{};
  std::chrono::nanoseconds left{};  // until the wait fails, unless there is progress

  /// "rank 0 of 4: waiting for rank 3 in dispatch (call 12) for 10 s; gives up in 590 s"
  std::string text() const;
};

/// Receives notices of long waits, for example to print them: the library itself prints nothing.
/// Called by the waiting thread, at most once per wait. Exceptions are ignored. Must not use the
/// group.
using OnWait = std::function<void(const WaitNotice&)>;

/// The operation that a wait belongs to, and how long it may take.
struct WaitContext {
  const char* operation = "";           // a string literal, for messages
  uint64_t sequence = 0;                // number of the collective in its group
  std::chrono::nanoseconds arrival{};   // time for a peer to arrive at this operation
  std::chrono::nanoseconds progress{};  // time without any progress once data is moving
  const OnWait* on_wait = nullptr;      // (optional) called after notice_after without progress
  std::chrono::nanoseconds notice_after{};
};

/// Bytes and requests of a communicator since its creation.
struct Traffic {
  int64_t bytes_within_node = 0;       // sent to other ranks on this node
  int64_t bytes_between_nodes = 0;     // sent to ranks on other nodes
  int64_t requests_posted = 0;         // 0 if the communicator has no requests
  int64_t max_requests_in_flight = 0;  // largest number pending at once
};

/// Moves bytes between the P ranks of a group. Knows nothing about tokens.
///
/// The two exchanges are collective: all ranks call them in the same order with matching sizes.
/// Sizes of 0 and null pointers are valid. Every wait has a deadline (WaitContext); a failed wait
/// throws Error (kTimeout, kPeerFailed or kCommunication) with the culprit in its context, and
/// afterwards only abort, leave, subgroup and the destructor may be called. A communicator may be
/// used by any thread, but by only one at a time. Implement the pure members; the others have
/// defaults. examples/05_own_communicator.cpp is a complete one.
class CROSSDOCK_API Communicator {
 public:
  /// Tells the peers that this rank has left, unless leave() did. Not collective; never waits.
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// "threads", "mpi", ...
  virtual std::string_view name() const = 0;

  /// Sends all of `send` to every rank. Bytes [recv_offsets[r], recv_offsets[r + 1]) of recv come
  /// from rank r. recv_offsets has P + 1 entries, identical on every rank.
  virtual void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                            std::span<const int64_t> recv_offsets, const WaitContext& wait) = 0;

  /// Sends bytes [send_offsets[r], send_offsets[r + 1]) of send to rank r, and receives bytes
  /// [recv_offsets[r], recv_offsets[r + 1]) of recv from it. Both arrays have P + 1 entries.
  virtual void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                            const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                            const WaitContext& wait) = 0;

  /// A communicator of `members` (ranks of this one, ascending, including this rank). Called by the
  /// members only; also after a failure, so that the survivors can continue.
  virtual std::unique_ptr<Communicator> subgroup(std::span<const int> members) = 0;

  /// Which ranks share a node. Used by `auto` and the strategies.
  virtual const Topology& topology() const = 0;

  /// (optional) Whether the ranks are threads of one process, which can use each other's pointers.
  virtual bool shares_address_space() const { return false; }

  /// (optional, with shares_address_space) Holds `memory` until every rank has left this
  /// communicator: until then a peer that knows its address, even a stalled one, may use it.
  virtual void keep_alive(const std::shared_ptr<const void>& /*memory*/) {}

  /// (optional) Tells the peers that this rank gave up and why, so that their waits throw at once,
  /// with the same reason and culprit, instead of at their deadlines. Never waits.
  virtual void abort(const Error& /*cause*/) {}

  /// (optional) Tells the peers that this rank makes no further calls. Their waits for this rank
  /// throw kPeerFailed with this reason. Never waits.
  virtual void leave(std::string_view /*reason*/) {}

  /// (optional) Limit on the bytes in flight from this rank to its peers, and separately on those
  /// from its peers; 0: no limit. Identical on every rank.
  virtual int64_t max_bytes_in_flight() const { return 0; }

  /// (optional) What a user should know about this rank's connections, as one line for logs: at
  /// most 23 characters, which groups record as an event, then a colon and the details. Empty:
  /// nothing.
  virtual std::string note() const { return {}; }

  /// (optional) Traffic so far.
  virtual Traffic traffic() const { return {}; }
};

}  // namespace crossdock
