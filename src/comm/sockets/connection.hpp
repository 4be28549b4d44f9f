#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/polled/control_message.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/socket.hpp"
#include "comm/waiting.hpp"

namespace crossdock::comm {

/// Every message on a connection between nodes: this header, then payload_bytes bytes. A connection
/// begins with kHello from the process that opened it, and with kWelcome from the other process if
/// it keeps the connection (PairConnection); everything else is refused before that.
struct FrameHeader {
  static constexpr uint32_t kMagic = 0x46534443;  // "CDSF": Crossdock sockets, frame
  enum class Kind : uint32_t {
    kHello = 1,    // payload: Hello
    kControl = 2,  // payload: ControlMessage
    kData = 3,     // payload: the next bytes of the stream to the receiver
    kCredit = 4,   // position: bytes of the receiver's stream that the sender has consumed so far
    kWelcome = 5   // no payload
  };

  uint32_t magic = kMagic;
  Kind kind = Kind::kData;
  uint32_t payload_bytes = 0;
  uint32_t reserved = 0;
  uint64_t comm_id = 0;   // the communicator that it belongs to; 0 with kHello, kWelcome
  uint64_t position = 0;  // kData: position of the payload in the stream; kCredit: see above
};
static_assert(sizeof(FrameHeader) == 32);

/// Largest payload; SocketsOptions::chunk_bytes is at most this.
inline constexpr uint32_t kMaxPayloadBytes = 1U << 20;

/// The first frame of a connection.
struct Hello {
  uint32_t version = kSocketsVersion;
  int32_t rank = -1;   // of the sender, in the world of the blobs
  uint64_t world = 0;  // hash of all blobs
  Secret secret{};     // of the receiver
};
static_assert(sizeof(Hello) == 32);

/// Whether the header is valid in this protocol: a known kind with the right payload size.
/// `is_known`: the sender has said a valid hello; before that only kHello is valid, and afterwards
/// it is not.
bool is_valid(const FrameHeader& header, bool is_known);

/// The header at the beginning of `bytes`; nullopt if there are fewer bytes than a header has.
std::optional<FrameHeader> read_header(std::span<const std::byte> bytes);

/// The payload as a plain struct. REQUIRES: payload has its size.
template <typename Payload>
Payload read_payload(std::span<const std::byte> payload);

extern template Hello read_payload<Hello>(std::span<const std::byte>);
extern template ControlMessage read_payload<ControlMessage>(std::span<const std::byte>);

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
  /// Hands over the socket of a connection that ends normally; see endpoint.hpp.
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
