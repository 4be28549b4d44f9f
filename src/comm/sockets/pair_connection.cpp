#include "comm/sockets/pair_connection.hpp"

namespace crossdock::comm {

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
