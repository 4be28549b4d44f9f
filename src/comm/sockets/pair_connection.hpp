#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/sockets/connection.hpp"

namespace crossdock::comm {

/// The connection between this process and one peer, and whether the peer has ended.
///
/// A pair of processes has one connection, opened by the one that needs it first. The opener says
/// hello; the other one answers with a welcome, and both send over it. If both open one at the same
/// time, the connection of the lower rank is kept:
///
/// - The lower rank uses its own connection at once. It never welcomes the other one, the spare,
///   but reads control messages from it until the peer has welcomed the kept one; then it closes
///   the spare.
/// - The higher rank sends no data before a welcome, and keeps copies of its control messages. If
///   the peer's connection arrives instead, it welcomes that one and sends the copies there first.
///   The lower rank skips as many as it has read from the spare.
///
/// Thus every frame arrives exactly once and in order, and control messages, such as the last ones
/// of an exiting process, never wait.
class PairConnection {
 public:
  explicit PairConnection(bool has_lower_rank) : has_lower_rank_(has_lower_rank) {}

  /// Why the peer can no longer be reached; nullopt while it can.
  const std::optional<std::string>& ended() const { return ended_; }
  /// Whether anything can still be sent. False as soon as the peer has closed a connection.
  bool is_usable() const { return !ended_ && !is_ending_; }
  /// Whether there is a connection to send over.
  bool is_open() const { return sends_by_ != nullptr; }
  /// This process has opened a connection and said hello. REQUIRES: !is_open().
  void open(Connection& connection) { sends_by_ = &connection; }

  /// Sends a small frame, ahead of data that has not been accepted yet. REQUIRES: is_open().
  void send(const FrameHeader& header, std::span<const std::byte> payload);
  bool takes_data() const;
  /// REQUIRES: takes_data().
  void send_data(const FrameHeader& header, std::span<const std::byte> payload) {
    sends_by_->send_data(header, payload);
  }
  /// Whether the kernel has taken all data that was sent.
  bool is_flushed() const;

  /// The peer, rank `peer`, has said hello on a connection that this process accepted. False if the
  /// connection must be refused.
  bool handle_hello(Connection& connection, int peer);
  /// The peer has said welcome. False if it was not allowed to.
  bool handle_welcome(const Connection& connection);
  /// What to do with any other frame.
  enum class Verdict { kDeliver, kSkip, kMalformed };
  Verdict judge_frame(const Connection& connection);

  void note_closed(const Connection& connection);
  /// The connections have been closed by this process.
  void forget_connections() { sends_by_ = spare_ = replaced_ = nullptr; }

 private:
  bool must_keep_copies() const { return !has_lower_rank_ && !is_agreed_; }

  const bool has_lower_rank_;
  Connection* sends_by_ = nullptr;
  Connection* spare_ = nullptr;     // lower rank: opened by the peer, only read
  Connection* replaced_ = nullptr;  // higher rank: opened here and given up; the peer closes it
  bool is_agreed_ = false;          // one of the two has welcomed sends_by_
  bool has_connected_ = false;      // the peer has said hello
  std::vector<std::byte> copies_;   // of frames sent before a welcome
  size_t num_from_spare_ = 0;       // frames read there
  size_t num_to_skip_ = 0;          // frames already read from the spare
  bool is_ending_ = false;          // the peer has closed one of its connections
  bool has_lost_data_ = false;      // written for the peer but not sent
  std::optional<std::string> ended_;
};

}  // namespace crossdock::comm
