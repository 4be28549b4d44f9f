#include "comm/sockets/connection.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/check.hpp"

namespace crossdock::comm {

static_assert(std::is_trivially_copyable_v<Hello> && std::is_trivially_copyable_v<ControlMessage>);

bool is_valid(const FrameHeader& header, bool is_known) {
  using Kind = FrameHeader::Kind;
  if (header.magic != FrameHeader::kMagic || header.reserved != 0) return false;
  if (header.kind == Kind::kHello) {
    return !is_known && header.payload_bytes == sizeof(Hello) && header.comm_id == 0 &&
           header.position == 0;
  }
  if (header.kind == Kind::kWelcome) {
    return is_known && header.payload_bytes == 0 && header.comm_id == 0 && header.position == 0;
  }
  if (!is_known || header.comm_id == 0) return false;
  switch (header.kind) {
    case Kind::kControl:
      return header.payload_bytes == sizeof(ControlMessage) && header.position == 0;
    case Kind::kData:
      return header.payload_bytes > 0 && header.payload_bytes <= kMaxPayloadBytes;
    case Kind::kCredit:
      return header.payload_bytes == 0;
    default:
      return false;
  }
}

std::optional<FrameHeader> read_header(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(FrameHeader)) return std::nullopt;
  FrameHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  return header;
}

template <typename Payload>
Payload read_payload(std::span<const std::byte> payload) {
  CROSSDOCK_ASSERT(payload.size() == sizeof(Payload));
  Payload result;
  std::memcpy(&result, payload.data(), sizeof result);
  return result;
}

template Hello read_payload<Hello>(std::span<const std::byte>);
template ControlMessage read_payload<ControlMessage>(std::span<const std::byte>);

namespace {

constexpr size_t kReadBytes = size_t{256} << 10;
constexpr int kMaxReads = 8;  // in one call, so one peer does not delay the others

// Whether the peer's machine reports that the connection does not exist, or no longer exists.
bool is_from_peer(int error) {
  return error == ECONNREFUSED || error == ECONNRESET || error == EPIPE;
}

}  // namespace

void Connection::close(std::string reason) {
  if (is_closed()) return;
  close_reason_ = std::move(reason);
  socket_.close();
  has_lost_data_ |= !rest_.empty();
  rest_ = {};
  urgent_ = {};
  input_ = {};
  input_bytes_ = 0;
}

void Connection::fail(const char* what, int error) {
  if (is_closed()) return;
  was_closed_by_peer_ = is_from_peer(error) && input_bytes_ == 0;
  close(concat(what, ": ", std::strerror(error)));
}

// The peer no longer reads, but it may have sent something before that: read() finds the end.
void Connection::note_write_error(int error) {
  if (!is_from_peer(error)) {
    fail(kFailed, error);
    return;
  }
  has_lost_data_ |= !rest_.empty();
  rest_ = {};
  urgent_ = {};
  cannot_write_ = true;
}

Socket Connection::release() {
  close_reason_ = "it was closed here";
  return std::move(socket_);
}

void Connection::send(const FrameHeader& header, std::span<const std::byte> payload) {
  if (is_closed() || cannot_write_) return;
  append(urgent_, std::as_bytes(std::span(&header, 1)));
  append(urgent_, payload);
  flush();
}

void Connection::send_data(const FrameHeader& header, std::span<const std::byte> payload) {
  std::array<iovec, 2> parts{};
  parts[0] = {const_cast<FrameHeader*>(&header), sizeof header};
  parts[1] = {const_cast<std::byte*>(payload.data()), payload.size()};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ssize_t sent = sendmsg(socket_.descriptor(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (!is_temporary(errno)) {
      note_write_error(errno);
      has_lost_data_ = true;
      return;
    }
    sent = 0;
  }
  const auto header_bytes = std::as_bytes(std::span(&header, 1));
  const auto done = static_cast<size_t>(sent);
  if (done < header_bytes.size()) append(rest_, header_bytes.subspan(done));
  const size_t payload_done = done > header_bytes.size() ? done - header_bytes.size() : 0;
  append(rest_, payload.subspan(payload_done));
}

// Returns whether all of it has been written.
bool Connection::write_some(std::vector<std::byte>& bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t sent = ::send(socket_.descriptor(), bytes.data() + done, bytes.size() - done,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (is_temporary(errno)) break;
      note_write_error(errno);
      return false;
    }
    done += static_cast<size_t>(sent);
  }
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(done));
  return bytes.empty();
}

void Connection::flush() {
  if (is_closed()) return;
  if (is_connecting_) {
    if (const int error = connect_error(socket_); error != 0) {
      fail(kCannotConnect, error);
      return;
    }
    // Connected once the peer's address is known; until then sends would fail with ENOTCONN.
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (getpeername(socket_.descriptor(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      return;
    }
    is_connecting_ = false;
  }
  if (!rest_.empty() && !write_some(rest_)) return;
  // The kernel may take part of a frame; data is accepted only once the queue is empty.
  if (!urgent_.empty()) write_some(urgent_);
}

int Connection::read(
    const std::function<bool(const FrameHeader&, std::span<const std::byte>)>& on_frame) {
  int num_malformed = 0;
  for (int i = 0; i < kMaxReads && !is_closed(); ++i) {
    // An unknown peer gets no more space than a hello needs.
    const size_t space = is_known() ? kReadBytes : sizeof(FrameHeader) + sizeof(Hello);
    if (input_.size() < input_bytes_ + space) input_.resize(input_bytes_ + space);
    const ssize_t got =
        recv(socket_.descriptor(), input_.data() + input_bytes_, space, MSG_DONTWAIT);
    const int error = got < 0 ? errno : 0;
    if (got < 0 && error != ECONNRESET) {
      if (!is_temporary(error)) fail(kFailed, error);
      break;
    }
    if (got <= 0) {  // also if the peer has closed it before it had read everything
      was_closed_by_peer_ = input_bytes_ == 0;
      close("its connection was closed");
      break;
    }
    input_bytes_ += static_cast<size_t>(got);
    const size_t used = parse(on_frame, num_malformed);
    if (is_closed()) break;
    std::memmove(input_.data(), input_.data() + used, input_bytes_ - used);
    input_bytes_ -= used;
    if (static_cast<size_t>(got) < space) break;
  }
  return num_malformed;
}

// Returns the bytes of the complete frames.
size_t Connection::parse(
    const std::function<bool(const FrameHeader&, std::span<const std::byte>)>& on_frame,
    int& num_malformed) {
  size_t used = 0;
  while (!is_closed()) {
    const auto unread = std::span<const std::byte>(input_).subspan(used, input_bytes_ - used);
    const auto header = read_header(unread);
    if (!header) break;
    if (!is_valid(*header, is_known())) {
      ++num_malformed;
      close("it sent a malformed frame");
      break;
    }
    const size_t frame_bytes = sizeof *header + header->payload_bytes;
    if (unread.size() < frame_bytes) break;
    const auto payload = unread.subspan(sizeof *header, header->payload_bytes);
    if (!on_frame(*header, payload)) {
      ++num_malformed;
      close("it sent a malformed frame");
      break;
    }
    used += frame_bytes;
  }
  return used;
}

void PairConnection::send(const FrameHeader& header, std::span<const std::byte> payload) {
  if (must_keep_copies()) {
    const auto bytes = std::as_bytes(std::span(&header, 1));
    copies_.insert(copies_.end(), bytes.begin(), bytes.end());
    copies_.insert(copies_.end(), payload.begin(), payload.end());
  }
  sends_by_->send(header, payload);
}

bool PairConnection::takes_data() const {
  return is_open() && !must_keep_copies() && sends_by_->takes_data();
}

bool PairConnection::is_flushed() const {
  return !has_lost_data_ && (!is_open() || sends_by_->is_flushed());
}

bool PairConnection::handle_hello(Connection& connection, int peer) {
  // The peer opens at most one connection, and none once it has welcomed one. It may have opened
  // one before its welcome, which then comes late.
  if (has_connected_ || (is_agreed_ && !has_lower_rank_)) return false;
  has_connected_ = true;
  connection.set_peer(peer);
  if (ended_) return true;  // its last frames
  if (has_lower_rank_ && is_open()) {
    if (is_agreed_) {
      connection.close("it was replaced");
    } else {
      spare_ = &connection;
    }
    return true;
  }
  replaced_ = sends_by_;
  sends_by_ = &connection;
  is_agreed_ = true;
  // The copies are whole frames: they follow the welcome as one piece.
  connection.send({.kind = FrameHeader::Kind::kWelcome, .payload_bytes = 0}, copies_);
  copies_ = {};
  return true;
}

bool PairConnection::handle_welcome(const Connection& connection) {
  if (&connection != sends_by_ || is_agreed_) return false;
  is_agreed_ = true;
  copies_ = {};
  num_to_skip_ = num_from_spare_;
  if (spare_ != nullptr) {
    spare_->close("it was replaced");
    spare_ = nullptr;
  }
  return true;
}

PairConnection::Verdict PairConnection::judge_frame(const Connection& connection) {
  if (&connection == replaced_) return Verdict::kMalformed;
  if (&connection == sends_by_) {
    if (!is_agreed_) return Verdict::kMalformed;
    if (num_to_skip_ == 0) return Verdict::kDeliver;
    --num_to_skip_;
    return Verdict::kSkip;
  }
  if (&connection == spare_) ++num_from_spare_;
  return Verdict::kDeliver;
}

// A peer that ends in an orderly way, or no longer listens, may have sent its last bytes over the
// spare: it has ended when both are closed.
void PairConnection::note_closed(const Connection& connection) {
  if (&connection == sends_by_) {
    sends_by_ = nullptr;
    has_lost_data_ |= !connection.is_flushed();
  } else if (&connection == spare_) {
    spare_ = nullptr;
  } else {
    if (&connection == replaced_) replaced_ = nullptr;
    return;
  }
  is_ending_ = true;
  const bool has_other = sends_by_ != nullptr || spare_ != nullptr;
  if (connection.was_closed_by_peer() && has_other) return;
  if (!ended_) ended_ = connection.close_reason();
}

}  // namespace crossdock::comm
