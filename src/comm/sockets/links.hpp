#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/failure.hpp"
#include "comm/polled/control_message.hpp"
#include "comm/sockets/endpoint.hpp"
#include "comm/sockets/node_memory.hpp"
#include "comm/waiting.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// How one rank reaches every other rank of one communicator: near ranks through memory that they
/// share (NodeStreams), far ranks through the endpoint's connections. Either way there is a stream
/// of bytes in each direction, and control messages that overtake it. If all ranks are near, they
/// can also show each other small blocks (Posts).
class Links final : public ControlLinks {
 public:
  struct Args {
    std::shared_ptr<Endpoint> endpoint;
    uint64_t comm_id = 0;
    std::vector<int> world_ranks;                             // [P] ranks of the endpoint's world
    int rank = 0;                                             // in the communicator
    Topology topology;                                        // of the communicator
    std::vector<std::shared_ptr<PeerDirectory>> directories;  // [P]; set for near ranks
    std::chrono::nanoseconds deadline{};                      // for the ranks of the node to arrive
    bool says_goodbye = true;  // false: no rank will wait for one that has left
  };
  /// Opens the communicator, and waits for the ranks of the node to do the same. Throws kTimeout or
  /// kPeerFailed, with the culprit, if one does not. If a rank cannot do its part, the ranks that
  /// still wait for it throw its error here, and the others in their first exchange.
  explicit Links(Args args);
  ~Links() override;
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  int rank() const { return args_.rank; }
  int size() const { return static_cast<int>(args_.world_ranks.size()); }
  const Args& args() const { return args_; }
  Endpoint& endpoint() const { return *args_.endpoint; }

  /// Null unless all ranks are on this node; member numbers are then ranks.
  Posts* posts() { return posts_.get(); }
  /// Whether every rank of the node can have its own core.
  bool may_spin() const { return may_spin_; }

  /// Called at the beginning of an exchange.
  void begin_exchange();
  /// Until the next exchange only a post of this near rank, or a control message, ends a sleep.
  void await_post_of(int peer);
  /// Prepares for an exchange with this peer: connects to a far one.
  void expect(int peer);
  /// Sends as many of these bytes, from the first, as possible now; returns their number.
  size_t write(int peer, std::span<const std::byte> bytes);
  /// Takes bytes that have arrived; returns their number.
  size_t read(int peer, std::span<std::byte> bytes);
  /// Copies bytes from a near rank that have arrived and leaves them there. Returns whether there
  /// were enough.
  bool peek(int peer, std::span<std::byte> bytes) const;
  /// Whether all bytes written for this peer are on their way, so this process may exit.
  bool is_flushed(int peer) const;
  /// Advances the connections.
  void poll() const;
  /// Why nothing more will arrive from this peer, once everything that did arrive has been read.
  std::optional<std::string> end_of(int peer) const;

  /// Why a near rank could not do its part of the communicator, if there is one.
  std::optional<ControlMessage> refusal() const;

  /// Waits a little: nothing has moved for `idle`. Spins first if every rank of the node can have
  /// its own core, then sleeps until something happens, at most for a few milliseconds.
  void pause(std::chrono::nanoseconds idle);

  void send(int peer, const ControlMessage& message) override;
  void send_to_all_others(const ControlMessage& message) override;
  void say_goodbye(const ControlMessage& message) const override;
  void poll(const std::function<void(int sender, const ControlMessage&)>& handle) override;

 private:
  bool is_near(int peer) const { return member_of_rank_[static_cast<size_t>(peer)] >= 0; }
  int world_rank(int peer) const { return args_.world_ranks[static_cast<size_t>(peer)]; }
  void send_to(int peer, const ControlMessage& message) const;
  void tell_all_others(const ControlMessage& message) const;
  void share_memory(const std::vector<int>& near);
  void check_arrival(int peer, Clock::time_point begin) const;
  std::optional<Failure> failure_to_arrive(int peer, Clock::time_point begin) const;
  void announce(const Failure& failure) const;
  [[noreturn]] void give_up(const Failure& failure) const;

  const Args args_;
  std::vector<int> member_of_rank_;  // [P] number on the node; -1: far
  std::vector<int> rank_of_world_;   // ranks of the world -> ranks here; -1: no member
  bool has_far_ = false;
  bool may_spin_ = false;
  uint32_t awaited_ = NodeFileHead::kForAnything;
  // Null if there are no near ranks.
  std::unique_ptr<NodeMemory> memory_;
  std::unique_ptr<NodeStreams> near_;
  std::unique_ptr<Posts> posts_;
};

}  // namespace crossdock::comm
