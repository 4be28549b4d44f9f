#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/deadlines.hpp"
#include "comm/sockets/frame.hpp"
#include "comm/sockets/socket.hpp"

namespace crossdock::comm {

/// One TCP connection that carries frames. Never waits. Used by one thread at a time.
///
/// Control frames overtake data: data is accepted only if nothing is queued, so control frames wait
/// only for the part of a data frame that the kernel has not taken yet.
class Connection {
 public:
  /// `peer`: rank at the other end in the world of the blobs; -1 until it has said hello.
  Connection(Socket socket, int peer, bool is_connecting)
      : socket_(std::move(socket)), peer_(peer), is_connecting_(is_connecting) {}

  int peer() const { return peer_; }
  void set_peer(int peer) { peer_ = peer; }
  bool is_known() const { return peer_ >= 0; }
  int descriptor() const { return socket_.descriptor(); }
  Clock::time_point opened_at() const { return opened_at_; }

  /// Whether the connection can no longer be used, and why.
  bool is_closed() const { return !close_reason_.empty(); }
  /// Whether the other end has closed or refused it, and not in the middle of a frame.
  bool was_closed_by_peer() const { return was_closed_by_peer_; }
  const std::string& close_reason() const { return close_reason_; }
  void close(std::string reason);
  /// Closes it after a call that failed with this error number; the reason begins with `what`.
  void fail(const char* what, int error);
  static constexpr const char* kCannotConnect = "cannot connect to its process";
  /// Hands over the socket of a connection that ends normally; see linger.hpp.
  Socket release();

  /// Sends a small frame, ahead of data that has not been accepted yet.
  void send(const FrameHeader& header, std::span<const std::byte> payload);
  bool takes_data() const { return !is_closed() && !cannot_write_ && !wants_to_write(); }
  /// Sends a data frame; keeps a copy of what the kernel does not take. REQUIRES: takes_data().
  void send_data(const FrameHeader& header, std::span<const std::byte> payload);

  bool wants_to_write() const { return is_connecting_ || !rest_.empty() || !urgent_.empty(); }
  /// Whether the kernel has taken all data that was accepted.
  bool is_flushed() const { return rest_.empty() && !has_lost_data_; }
  /// Writes as much of the queue as the kernel takes. Also completes connecting.
  void flush();

  /// Reads what has arrived and calls `on_frame` for each complete frame. A malformed frame closes
  /// the connection; on_frame returns false if it finds one. Returns the number of malformed
  /// frames.
  int read(const std::function<bool(const FrameHeader&, std::span<const std::byte>)>& on_frame);

 private:
  static constexpr const char* kFailed = "its connection failed";

  void note_write_error(int error);
  bool write_some(std::vector<std::byte>& bytes);
  size_t parse(const std::function<bool(const FrameHeader&, std::span<const std::byte>)>& on_frame,
               int& num_malformed);

  Socket socket_;
  int peer_;
  bool is_connecting_;
  std::string close_reason_;
  const Clock::time_point opened_at_ = Clock::now();
  std::vector<std::byte> rest_;    // of a frame that has been sent in part
  std::vector<std::byte> urgent_;  // whole frames
  std::vector<std::byte> input_;   // space for received bytes
  size_t input_bytes_ = 0;         // bytes in use: the beginning of a frame
  bool cannot_write_ = false;      // the peer no longer reads
  bool has_lost_data_ = false;
  bool was_closed_by_peer_ = false;
};

}  // namespace crossdock::comm
