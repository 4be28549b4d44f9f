#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/polled/control_message.hpp"
#include "comm/sockets/connection.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/socket.hpp"
#include "core/process.hpp"
#include "crossdock/sockets.hpp"

namespace crossdock::comm {

/// The stream of bytes between this process and one far peer, in one communicator. The sender may
/// be at most window_bytes ahead of what the receiver has consumed. This bounds the receiver's
/// memory, and control frames never wait behind data that nobody reads.
class FarStream {
 public:
  explicit FarStream(int64_t window_bytes) : window_bytes_(static_cast<uint64_t>(window_bytes)) {}

  /// Bytes that may be sent now.
  uint64_t credit() const { return window_bytes_ - (num_sent_ - num_acknowledged_); }
  uint64_t num_sent() const { return num_sent_; }
  void note_sent(size_t num_bytes) { num_sent_ += num_bytes; }
  /// False if the peer cannot have consumed that much.
  bool note_consumed_by_peer(uint64_t position);

  /// False if the bytes are not the next of the stream, or more than the peer may send.
  bool receive(uint64_t position, std::span<const std::byte> bytes);
  bool has_unread() const { return num_received_ > num_consumed_; }
  size_t read(std::byte* out, size_t max_bytes);
  /// Whether the peer should be told how much has been consumed: at every quarter of the window.
  bool owes_credit() const { return num_consumed_ - num_credited_ >= (window_bytes_ + 3) / 4; }
  uint64_t credit_position() { return num_credited_ = num_consumed_; }

 private:
  uint64_t window_bytes_;
  uint64_t num_sent_ = 0;
  uint64_t num_acknowledged_ = 0;
  uint64_t num_received_ = 0;
  uint64_t num_consumed_ = 0;
  uint64_t num_credited_ = 0;
  std::vector<std::byte> unread_;  // begins with unread_begin_ bytes that have been read
  size_t unread_begin_ = 0;
};

/// Bytes and messages that far peers have sent to one communicator and that have not been taken
/// yet.
struct EndpointInbox {
  bool is_open = false;  // false: a peer was faster than this process in making the communicator
  std::map<int, FarStream> streams;  // by rank in the world of the blobs
  std::deque<std::pair<int, ControlMessage>> messages;

  FarStream& stream(int peer, int64_t window_bytes) {
    return streams.try_emplace(peer, window_bytes).first->second;
  }
};

/// The processes that joined together. Ranks of an endpoint are indices of `blobs`.
struct SocketsWorld {
  int rank = 0;
  std::vector<SocketsBlob> blobs;  // [P]
  uint64_t id = 0;                 // hash of all blobs

  int size() const { return static_cast<int>(blobs.size()); }
  const SocketsBlob& own() const { return blobs[static_cast<size_t>(rank)]; }
};

/// Limits for connections that have not said hello.
struct StrangerLimits {
  ptrdiff_t max_strangers = 64;
  std::chrono::nanoseconds hello_time = std::chrono::seconds(60);  // to say hello
  std::chrono::nanoseconds busy_time = std::chrono::seconds(1);    // the same, if others wait
};

/// The connections of this process to the others of its world, one per peer, shared by a
/// communicator and its subgroups, told apart by comm_id. A connection is opened when one of its
/// two processes first needs it.
///
/// May be used by several threads at once. Nothing here waits except wait_for_sockets. In a forked
/// child only the destructor may be called, and it does nothing.
class Endpoint {
 public:
  Endpoint(Socket listener, std::unique_ptr<Directory> directory, SocketsWorld world,
           const SocketsOptions& options, const StrangerLimits& limits = {});
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const SocketsWorld& world() const { return world_; }
  const SocketsOptions& options() const { return options_; }
  Directory& directory() { return *directory_; }
  bool is_in_creator() const { return generation_ == fork_generation(); }

  /// Opens a communicator; data that peers have already sent to it can be read.
  void open_communicator(uint64_t comm_id);
  /// Frames for this communicator are dropped from now on.
  void close_communicator(uint64_t comm_id);
  /// Closes the listening socket and all connections: every process of the world is near.
  void stop_listening();

  /// Connects to a peer unless already connected. Also lets this process detect the peer's end.
  void connect(int peer);
  /// Why a peer can no longer be reached; nullopt while it can.
  std::optional<std::string> end_of(int peer) const;

  /// Sends as many of these bytes, from the first, as credit and kernel allow; returns their
  /// number.
  size_t write(uint64_t comm_id, int peer, std::span<const std::byte> bytes);
  /// Takes bytes that have arrived; returns their number.
  size_t read(uint64_t comm_id, int peer, std::span<std::byte> bytes);
  bool has_unread(uint64_t comm_id, int peer) const;
  /// Whether the kernel has taken all bytes that were written for this peer.
  bool is_flushed(int peer) const;
  /// Whether anything, control messages included, still waits to be sent.
  bool has_unsent() const;

  void send_control(uint64_t comm_id, int peer, const ControlMessage& message);
  std::optional<std::pair<int, ControlMessage>> take_control(uint64_t comm_id);

  /// Accepts, reads and writes what is possible now.
  void poll();
  /// Waits until a socket can be read or written, at most for `timeout`.
  void wait_for_sockets(std::chrono::nanoseconds timeout);

  SocketsCounters counters() const;
  /// Open connections with peers; connections that have not said hello are not counted.
  int num_connections() const;

 private:
  // REQUIRES for all of them: mutex_ is held.
  PairConnection& pair(int peer) { return pairs_[static_cast<size_t>(peer)]; }
  const PairConnection& pair(int peer) const { return pairs_[static_cast<size_t>(peer)]; }
  PairConnection* connected_pair(int peer);
  std::vector<pollfd> poll_entries() const;
  void accept_all();
  bool handle(Connection& connection, const FrameHeader& header,
              std::span<const std::byte> payload);
  bool handle_hello(Connection& connection, const Hello& hello);
  EndpointInbox* inbox_for(uint64_t comm_id);
  void drop_silent_connections();
  Connection* stranger_in_the_way() const;
  bool may_accept() const;
  void read_from(Connection& connection);
  void note_closed(const Connection& connection);
  void forget_closed_connections();

  const SocketsWorld world_;
  const SocketsOptions options_;
  const StrangerLimits limits_;
  const uint64_t generation_ = fork_generation();
  const std::unique_ptr<Directory> directory_;
  mutable std::mutex mutex_;
  Socket listener_;
  Clock::time_point next_accept_{};
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<PairConnection> pairs_;  // [P] with each peer; this process's own is not used
  std::map<uint64_t, EndpointInbox> inboxes_;
  std::set<uint64_t> closed_ids_;
  SocketsCounters counters_;
};

/// Closes connections so that the peers still get everything that was sent. Closing a socket with
/// unread bytes would discard what the kernel has not sent yet, so the sockets are shut down for
/// writing and kept until the peers have closed theirs. Never waits; only the exit of the process
/// waits, for at most two seconds, until the peers have received all bytes.
void close_gently(std::vector<Socket> sockets);

/// Sends what the connections could not take yet, on a separate thread and for a limited time. For
/// an abort, which must reach the peers even if this process makes no further call. Never waits.
void flush_in_background(std::shared_ptr<Endpoint> endpoint);

}  // namespace crossdock::comm
