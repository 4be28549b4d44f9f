#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "comm/waiting.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// The bytes that one rank exchanges with one peer.
struct PeerBytes {
  const std::byte* send = nullptr;
  int64_t send_bytes = 0;
  std::byte* recv = nullptr;
  int64_t recv_bytes = 0;
};

/// The messages of one exchange, from its beginning until all have been sent and received.
/// Destroying it before that abandons the rest.
class Transfers {
 public:
  virtual ~Transfers() = default;

  virtual bool is_done() const = 0;
  /// Moves as much as possible without waiting. Returns whether anything has been sent or received.
  virtual bool advance() = 0;

  /// Whether bytes to or from this peer are missing.
  virtual bool is_pending(int peer) const = 0;
  /// Whether anything has arrived from this peer, so it is known to take part.
  virtual bool has_arrived(int peer) const = 0;

  virtual int size() const = 0;
  /// Peers with missing bytes, ascending.
  std::vector<int> pending_peers() const;
};

/// The bytes still to be exchanged in one direction, in chunks.
///
/// Chunk j of all peers comes before chunk j + 1 of any, and peers come in the order in which they
/// were added. All ranks add the others in the order of their distance (rank + 1, rank + 2, ... for
/// sends, rank - 1, rank - 2, ... for receives), so the first incomplete message in the order of
/// (chunk, distance) is the next one on both sides: there is always progress, even with the
/// smallest limit on chunks in flight.
class ChunkQueue {
 public:
  struct Chunk {
    int peer = 0;
    int64_t offset = 0;  // in the bytes of this peer
    int64_t num_bytes = 0;
  };

  explicit ChunkQueue(int64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

  /// Returns the number of chunks added.
  int64_t add(int peer, int64_t num_bytes);
  bool empty() const { return cursors_.empty(); }
  /// Takes the next chunk. REQUIRES: !empty().
  Chunk take();

 private:
  struct Cursor {
    int peer = 0;
    int64_t done_bytes = 0;
    int64_t num_bytes = 0;
  };
  int64_t chunk_bytes_;
  std::vector<Cursor> cursors_;  // in the order of their next chunks
  size_t next_ = 0;
};

/// The deadlines of one exchange. A peer must arrive within `arrival` of the beginning; once all
/// pending peers have arrived, at most `progress` may pass without a message.
class WaitClock {
 public:
  explicit WaitClock(const WaitContext& wait)
      : wait_(wait), begin_(Clock::now()), last_progress_(begin_) {}

  void note_progress() { last_progress_ = Clock::now(); }
  std::chrono::nanoseconds idle() const { return Clock::now() - last_progress_; }

  /// The time waited, if over the deadline.
  std::optional<std::chrono::nanoseconds> expired(const Transfers& transfers) const;
  /// The time left if there is no further progress.
  std::chrono::nanoseconds left(const Transfers& transfers) const;

 private:
  Clock::time_point end_if(bool all_arrived) const;

  const WaitContext& wait_;
  Clock::time_point begin_;
  Clock::time_point last_progress_;
};

}  // namespace crossdock::comm
