#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/memory/shared_file.hpp"
#include "comm/polled/control_message.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/endpoint.hpp"

namespace crossdock::comm {

/// The processes that share a node with this one: those that it sees and whose memory files it can
/// open.
struct ReachablePeers {
  std::vector<std::shared_ptr<PeerDirectory>> directories;  // [P]; null: not reachable, or itself
  std::vector<uint8_t> reaches;                             // [P] 1: reachable, or itself
  std::string note;  // about the first process on this machine that cannot be reached; else empty
};
ReachablePeers find_reachable_peers(const SocketsWorld& world);

/// Node ids [P] from the rows [P][P] of `reaches` of all ranks. Nodes are ordered by their lowest
/// rank. A rank joins the first node whose members all share memory with it, both ways.
std::vector<int> group_into_nodes(std::span<const uint8_t> rows, int size);

/// The head of a stream: one direction between two ranks of a node, in the memory file of the
/// receiver. A ring of bytes follows. An all-zero stream is empty. Positions count all bytes or
/// messages since the beginning.
struct StreamHead {
  static constexpr size_t kNumMessages = 4;

  alignas(64) std::atomic<uint64_t> bytes_written;  // by the sender
  alignas(64) std::atomic<uint64_t> bytes_read;     // by the receiver
  alignas(64) std::atomic<uint64_t> messages_written;
  alignas(64) std::atomic<uint64_t> messages_read;
  std::array<ControlMessage, kNumMessages> messages;
};

/// A few bytes that a rank shows to all ranks of its node at once, in its own memory file.
struct Post {
  static constexpr size_t kMaxBytes = 4096 - 3 * sizeof(uint64_t);

  alignas(128) std::atomic<uint64_t> number;  // counted from 1; written last
  uint64_t exchange;
  uint64_t num_bytes;
  std::array<std::byte, kMaxBytes> bytes;
};
static_assert(sizeof(Post) == 4096);

/// The head of a rank's memory file for one communicator. One stream per rank of the node follows.
struct NodeFileHead {
  static constexpr size_t kMaxMembers = 4096;
  /// Values of `sleeps`; kForPostOf + m: only a post of member m or a control message matters.
  static constexpr uint32_t kAwake = 0;
  static constexpr uint32_t kForAnything = 1;
  static constexpr uint32_t kForPostOf = 2;

  uint64_t comm_id;                                  // whose memory this is
  alignas(64) std::atomic<uint32_t> bell;            // futex: changes to wake the owner
  alignas(64) std::atomic<uint32_t> sleeps;          // what the owner is about to sleep for
  alignas(64) std::atomic<uint64_t> messages_to_me;  // control messages of all senders
  alignas(64) std::array<std::atomic<uint8_t>, kMaxMembers> has_opened;  // by member
  std::array<Post, 2> posts;                                             // by number % 2
};

/// A failure to arrive that only this rank knows about so far.
struct MemberIsMissing : std::exception {
  explicit MemberIsMissing(Failure found) : failure(std::move(found)) {}
  Failure failure;
};

/// The memory files of the ranks of one node in one communicator, seen from one of them, and how
/// these ranks sleep and wake each other. Members are numbered from 0 in the order of their ranks.
class NodeMemory {
 public:
  struct Args {
    uint64_t comm_id = 0;
    int self = 0;                             // this rank's number
    std::vector<const SocketsBlob*> blobs;    // of the members
    std::vector<PeerDirectory*> directories;  // of the members; null for this rank
    /// Called every millisecond with the number of an awaited member; throws to give up:
    /// MemberIsMissing if the member will not do its part, unless it has just done it.
    std::function<void(int missing)> while_waiting;
  };
  /// Makes this rank's file, opens those of the members and waits until every member has opened
  /// this one: afterwards any of them may leave at any time.
  NodeMemory(const Args& args, Directory& directory);
  ~NodeMemory();
  NodeMemory(const NodeMemory&) = delete;
  NodeMemory& operator=(const NodeMemory&) = delete;

  int self() const { return self_; }
  int size() const { return static_cast<int>(files_.size()); }
  /// A power of two; smaller for more members, to keep the memory of a node small.
  size_t ring_bytes() const { return ring_bytes_; }

  NodeFileHead& head(int owner) const;
  StreamHead& stream(int owner, int sender) const;
  std::byte* ring(int owner, int sender) const;

  /// Called after something was written for `member`.
  void wake(int member) const;
  /// Called after this rank has written a post.
  void wake_for_post() const;

  /// Sleeping takes two steps, so nothing is missed: call prepare_to_sleep, check once more whether
  /// anything can be done, then sleep until a member wakes this rank, at most for `timeout`.
  /// `awaited`: NodeFileHead::kForAnything or kForPostOf + member.
  void prepare_to_sleep(uint32_t awaited);
  void sleep(std::chrono::nanoseconds timeout);
  void stay_awake();
  bool is_prepared(uint32_t awaited) const { return prepared_for_ == awaited; }

 private:
  void open_members(const Args& args);
  bool open_member(int member, const Args& args);

  const uint64_t id_;
  const int self_;
  const size_t ring_bytes_;
  Directory& directory_;
  std::vector<std::unique_ptr<SharedFile>> files_;  // [members]
  uint32_t prepared_for_ = NodeFileHead::kAwake;
  uint32_t bell_seen_ = 0;
};

/// Small blocks that every rank of a node shows to all others: one write instead of one per rank.
///
/// All members publish equally often. Post n is in slot n % 2 and may be overwritten by post n + 2:
/// no member publishes n + 1 before it has read all posts n, and none publishes n + 2 before it has
/// seen all posts n + 1.
class Posts {
 public:
  /// `memory` must outlive this.
  explicit Posts(NodeMemory& memory) : memory_(memory) {}

  /// Publishes this rank's next post. REQUIRES: bytes.size() <= Post::kMaxBytes, and all posts of
  /// the members before this one have been read.
  void publish(uint64_t exchange, std::span<const std::byte> bytes);
  /// The member's post with the number of this rank's last one; null if it is not there yet.
  const Post* find(int member) const;
  /// The member's next post, if the member is ahead of this rank; else null.
  const Post* find_next(int member) const;

 private:
  const Post* find_number(int member, uint64_t number) const;

  NodeMemory& memory_;
  uint64_t number_ = 0;  // of the last post
};

/// Streams of bytes and control messages between the ranks of one node, in their memory files.
///
/// Used by one thread at a time, except that another thread may call send_control concurrently.
class NodeStreams {
 public:
  /// `memory` must outlive this.
  explicit NodeStreams(NodeMemory& memory) : memory_(memory) {}

  /// Sends as many of these bytes, from the first, as there is room for; returns their number.
  size_t write(int member, std::span<const std::byte> bytes);
  /// Takes bytes that have arrived; returns their number.
  size_t read(int member, std::span<std::byte> bytes);
  /// Copies bytes that have arrived and leaves them there. Returns whether there were enough.
  bool peek(int member, std::span<std::byte> bytes) const;

  /// Drops a question or an answer if the stream is full: the receiver is then not in a call.
  /// There is always room for an abort and a goodbye.
  void send_control(int member, const ControlMessage& message);
  /// Whether any member has sent a control message since the last call.
  bool has_new_control();
  std::optional<ControlMessage> take_control(int member);

 private:
  NodeMemory& memory_;
  std::mutex control_mutex_;
  uint64_t messages_seen_ = 0;
};

}  // namespace crossdock::comm
