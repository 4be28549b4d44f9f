#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/error.hpp"

namespace crossdock {

/// Which ranks share a node, i.e. can reach each other's memory.
struct Topology {
  std::vector<int> node_of_rank;  // [P], nodes numbered by their lowest rank, from 0
  int num_nodes = 0;

  static Topology single_node(int size);
  /// Rank r is on node r / ranks_per_node.
  static Topology uniform(int size, int ranks_per_node);
  std::vector<int> ranks_of_node(int node) const;  // ascending
};

/// Memory handed to an engine. `owner` keeps it alive: after a failed wait a request may still name
/// the memory, and the engine then holds the owner until nothing can touch it any more.
/// REQUIRES: owner is set where num_bytes > 0.
struct SharedBytes {
  std::byte* data = nullptr;
  int64_t num_bytes = 0;
  std::shared_ptr<const void> owner;
};

/// What a wait belongs to and how long it may last.
struct WaitContext {
  const char* operation = "";           // a string literal, for messages
  uint64_t sequence = 0;                // number of the collective in its group
  std::chrono::nanoseconds arrival{};   // for a peer to arrive at this operation
  std::chrono::nanoseconds progress{};  // without any progress once data moves
};

/// What an engine has moved since it was made.
struct Traffic {
  int64_t bytes_within_node = 0;       // sent to other ranks of this node
  int64_t bytes_between_nodes = 0;     // sent to ranks of other nodes
  int64_t requests_posted = 0;         // 0 where the engine has no requests
  int64_t max_requests_in_flight = 0;  // highest number outstanding at once
};

/// Moves bytes between the P ranks of a group. Knows nothing of tokens.
///
/// The two exchanges are collective: all ranks call them in the same order with matching sizes.
/// Sizes of 0 and null pointers are normal. A failed wait throws Error (kTimeout, kPeerFailed or
/// kCommunication) with the culprit in its context; afterwards only abort, leave, subgroup and the
/// destructor may be called. Used by one thread at a time, by any thread. An engine implements the
/// pure members; the others have defaults.
class Communicator {
 public:
  /// Publishes "left" if leave() was not called. Never collective, never waits.
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// "threads", "mpi", ...
  virtual std::string_view name() const = 0;

  /// Block r of recv, bytes [recv_offsets[r], recv_offsets[r + 1]), is what rank r sent.
  /// recv_offsets has P + 1 entries, alike on all ranks.
  virtual void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                            std::span<const int64_t> recv_offsets, const WaitContext& wait) = 0;

  /// Bytes [send_offsets[r], send_offsets[r + 1]) of send go to rank r, those of recv come from it.
  /// Both arrays have P + 1 entries.
  virtual void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                            const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                            const WaitContext& wait) = 0;

  /// A communicator of `members` (ranks of this one, ascending, with this rank among them). Called
  /// by the members only; also after a failure, to go on with the survivors.
  virtual std::unique_ptr<Communicator> subgroup(std::span<const int> members) = 0;

  /// Which ranks share a node.
  virtual const Topology& topology() const = 0;

  /// (optional) Peers can use each other's pointers as they are (threads of one process).
  virtual bool shares_address_space() const { return false; }

  /// (optional, with shares_address_space) Holds `memory` until every rank of this communicator has
  /// left: a peer that was given its address, even a stalled one, may use it until then.
  virtual void keep_alive(const std::shared_ptr<const void>& /*memory*/) {}

  /// (optional) Tells the peers that this rank gave up and why, so that they need not wait for
  /// their deadline: their waits throw the same reason and culprit. Never waits.
  virtual void abort(const Error& /*cause*/) {}

  /// (optional) Tells the peers that this rank will make no further call. Their waits for it throw
  /// kPeerFailed with this reason. Never waits.
  virtual void leave(std::string_view /*reason*/) {}

  /// (optional) The most bytes that this rank can have on their way to others at once, and as many
  /// from them; 0: no limit. The same on all ranks.
  virtual int64_t max_bytes_in_flight() const { return 0; }

  /// (optional) What was moved so far.
  virtual Traffic traffic() const { return {}; }
};

}  // namespace crossdock
