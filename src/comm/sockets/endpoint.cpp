#include "comm/sockets/endpoint.hpp"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/waiting.hpp"
#include "core/check.hpp"
#include "core/process.hpp"

namespace crossdock::comm {

bool FarStream::note_consumed_by_peer(uint64_t position) {
  if (position < num_acknowledged_ || position > num_sent_) return false;
  num_acknowledged_ = position;
  return true;
}

bool FarStream::receive(uint64_t position, std::span<const std::byte> bytes) {
  if (position != num_received_) return false;
  if (num_received_ - num_consumed_ + bytes.size() > window_bytes_) return false;
  if (unread_begin_ >= window_bytes_) {  // keeps it to at most two windows
    unread_.erase(unread_.begin(), unread_.begin() + static_cast<ptrdiff_t>(unread_begin_));
    unread_begin_ = 0;
  }
  unread_.insert(unread_.end(), bytes.begin(), bytes.end());
  num_received_ += bytes.size();
  return true;
}

size_t FarStream::read(std::byte* out, size_t max_bytes) {
  const size_t num_bytes = std::min<size_t>(max_bytes, num_received_ - num_consumed_);
  if (num_bytes == 0) return 0;
  std::memcpy(out, unread_.data() + unread_begin_, num_bytes);
  unread_begin_ += num_bytes;
  if (unread_begin_ == unread_.size()) {
    unread_.clear();
    unread_begin_ = 0;
  }
  num_consumed_ += num_bytes;
  return num_bytes;
}

namespace {

constexpr std::chrono::milliseconds kAcceptPause{100};  // after accept failed
constexpr size_t kMaxEarlyCommunicators = 256;  // used by peers before this process has made them
constexpr size_t kMaxMessages = 4096;           // control messages that nobody has taken

}  // namespace

Endpoint::Endpoint(Socket listener, std::unique_ptr<Directory> directory, SocketsWorld world,
                   const SocketsOptions& options, const StrangerLimits& limits)
    : world_(std::move(world)),
      options_(options),
      limits_(limits),
      directory_(std::move(directory)),
      listener_(std::move(listener)) {
  for (int peer = 0; peer < world_.size(); ++peer) pairs_.emplace_back(world_.rank < peer);
}

Endpoint::~Endpoint() {
  if (!is_in_creator()) return;
  stop_listening();
}

void Endpoint::stop_listening() {
  const std::lock_guard lock(mutex_);
  listener_.close();
  std::vector<Socket> sockets;
  for (const auto& connection : connections_) {
    connection->flush();  // goodbyes
    if (!connection->is_closed()) sockets.push_back(connection->release());
  }
  connections_.clear();
  for (PairConnection& one : pairs_) one.forget_connections();
  close_gently(std::move(sockets));
}

void Endpoint::open_communicator(uint64_t comm_id) {
  const std::lock_guard lock(mutex_);
  CROSSDOCK_ASSERT(!inboxes_[comm_id].is_open && !closed_ids_.contains(comm_id));
  inboxes_[comm_id].is_open = true;
}

void Endpoint::close_communicator(uint64_t comm_id) {
  const std::lock_guard lock(mutex_);
  inboxes_.erase(comm_id);
  closed_ids_.insert(comm_id);
}

void Endpoint::connect(int peer) {
  const std::lock_guard lock(mutex_);
  connected_pair(peer);
}

std::optional<std::string> Endpoint::end_of(int peer) const {
  const std::lock_guard lock(mutex_);
  return pair(peer).ended();
}

// The pair, connected if it was not; null if the peer has ended.
PairConnection* Endpoint::connected_pair(int peer) {
  PairConnection& wanted = pair(peer);
  if (wanted.is_usable() && !wanted.is_open()) accept_all();  // it may have opened one
  if (!wanted.is_usable()) return nullptr;
  if (wanted.is_open()) return &wanted;
  const SocketsBlob& blob = world_.blobs[static_cast<size_t>(peer)];
  int error = 0;
  Socket socket = start_connecting(blob.address, error);
  connections_.push_back(
      std::make_unique<Connection>(std::move(socket), peer, /*is_connecting=*/true));
  Connection& opened = *connections_.back();
  wanted.open(opened);
  if (error != 0) {
    opened.fail(Connection::kCannotConnect, error);
    return &wanted;
  }
  const Hello hello{
      .version = kSocketsVersion, .rank = world_.rank, .world = world_.id, .secret = blob.secret};
  opened.send({.kind = FrameHeader::Kind::kHello, .payload_bytes = sizeof hello},
              std::as_bytes(std::span(&hello, 1)));
  return &wanted;
}

size_t Endpoint::write(uint64_t comm_id, int peer, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  PairConnection* to = connected_pair(peer);
  if (to == nullptr || !to->takes_data()) return 0;
  FarStream& stream = inboxes_[comm_id].stream(peer, options_.window_bytes);
  const auto num_bytes = static_cast<size_t>(std::min<uint64_t>(
      {bytes.size(), static_cast<uint64_t>(options_.chunk_bytes), stream.credit()}));
  if (num_bytes == 0) return 0;
  to->send_data({.kind = FrameHeader::Kind::kData,
                 .payload_bytes = static_cast<uint32_t>(num_bytes),
                 .comm_id = comm_id,
                 .position = stream.num_sent()},
                bytes.first(num_bytes));
  stream.note_sent(num_bytes);
  return num_bytes;
}

size_t Endpoint::read(uint64_t comm_id, int peer, std::span<std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  FarStream& stream = inboxes_[comm_id].stream(peer, options_.window_bytes);
  const size_t num_bytes = stream.read(bytes.data(), bytes.size());
  if (stream.owes_credit()) {
    if (PairConnection* to = connected_pair(peer)) {
      to->send({.kind = FrameHeader::Kind::kCredit,
                .payload_bytes = 0,
                .comm_id = comm_id,
                .position = stream.credit_position()},
               {});
    }
  }
  return num_bytes;
}

bool Endpoint::is_flushed(int peer) const {
  const std::lock_guard lock(mutex_);
  return pair(peer).is_flushed();
}

bool Endpoint::has_unsent() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(connections_.begin(), connections_.end(), [](const auto& connection) {
    return !connection->is_closed() && connection->wants_to_write();
  });
}

bool Endpoint::has_unread(uint64_t comm_id, int peer) const {
  const std::lock_guard lock(mutex_);
  const auto inbox = inboxes_.find(comm_id);
  if (inbox == inboxes_.end()) return false;
  const auto stream = inbox->second.streams.find(peer);
  return stream != inbox->second.streams.end() && stream->second.has_unread();
}

void Endpoint::send_control(uint64_t comm_id, int peer, const ControlMessage& message) {
  const std::lock_guard lock(mutex_);
  if (PairConnection* to = connected_pair(peer)) {
    to->send(
        {.kind = FrameHeader::Kind::kControl, .payload_bytes = sizeof message, .comm_id = comm_id},
        std::as_bytes(std::span(&message, 1)));
  }
}

std::optional<std::pair<int, ControlMessage>> Endpoint::take_control(uint64_t comm_id) {
  const std::lock_guard lock(mutex_);
  auto& messages = inboxes_[comm_id].messages;
  if (messages.empty()) return std::nullopt;
  auto first = std::move(messages.front());
  messages.pop_front();
  return first;
}

// The listener, then the connections, in order. The listener is left out while its connections may
// not be accepted: it would always be readable.
std::vector<pollfd> Endpoint::poll_entries() const {
  std::vector<pollfd> entries;
  const int listener = may_accept() ? listener_.descriptor() : -1;
  entries.push_back({.fd = listener, .events = POLLIN, .revents = 0});
  for (const auto& connection : connections_) {
    const int events = connection->wants_to_write() ? POLLIN | POLLOUT : POLLIN;
    entries.push_back(
        {.fd = connection->descriptor(), .events = static_cast<short>(events), .revents = 0});
  }
  return entries;
}

void Endpoint::poll() {
  const std::lock_guard lock(mutex_);
  auto entries = poll_entries();
  if (::poll(entries.data(), entries.size(), 0) > 0) {
    for (size_t i = 1; i < entries.size(); ++i) {
      if (entries[i].revents == 0) continue;
      Connection& connection = *connections_[i - 1];
      connection.flush();
      read_from(connection);
    }
    if (entries.front().revents != 0) accept_all();
  }
  drop_silent_connections();
  forget_closed_connections();
}

void Endpoint::wait_for_sockets(std::chrono::nanoseconds timeout) {
  std::vector<pollfd> entries;
  {
    const std::lock_guard lock(mutex_);
    entries = poll_entries();
  }
  const timespec time{.tv_sec = static_cast<time_t>(timeout.count() / 1'000'000'000),
                      .tv_nsec = static_cast<long>(timeout.count() % 1'000'000'000)};
  ppoll(entries.data(), entries.size(), &time, nullptr);
}

void Endpoint::accept_all() {
  while (may_accept()) {
    auto socket = accept_from(listener_);
    if (!socket) {
      if (!is_temporary(errno)) next_accept_ = Clock::now() + kAcceptPause;  // e.g. too many files
      return;
    }
    if (Connection* oldest = stranger_in_the_way()) oldest->close("it did not say hello");
    connections_.push_back(
        std::make_unique<Connection>(std::move(*socket), /*peer=*/-1, /*is_connecting=*/false));
    read_from(*connections_.back());  // a peer's hello is most likely there already
  }
}

// The oldest unknown connection; null if there is room for one more.
Connection* Endpoint::stranger_in_the_way() const {
  const auto is_stranger = [](const auto& one) { return !one->is_known() && !one->is_closed(); };
  const auto num_strangers = std::count_if(connections_.begin(), connections_.end(), is_stranger);
  if (num_strangers < limits_.max_strangers) return nullptr;
  return std::find_if(connections_.begin(), connections_.end(), is_stranger)->get();
}

// An unknown connection is dropped to make room if it has been silent for long: peers say hello as
// soon as they are connected.
bool Endpoint::may_accept() const {
  const auto now = Clock::now();
  if (now < next_accept_) return false;
  const Connection* oldest = stranger_in_the_way();
  return oldest == nullptr || now - oldest->opened_at() >= limits_.busy_time;
}

void Endpoint::read_from(Connection& connection) {
  counters_.malformed_frames +=
      connection.read([&](const FrameHeader& header, std::span<const std::byte> payload) {
        return handle(connection, header, payload);
      });
}

void Endpoint::drop_silent_connections() {
  const auto now = Clock::now();
  for (const auto& connection : connections_) {
    if (connection->is_known() || now - connection->opened_at() < limits_.hello_time) {
      continue;
    }
    connection->close("it did not say hello");
  }
}

void Endpoint::note_closed(const Connection& connection) {
  if (connection.is_known()) {
    pair(connection.peer()).note_closed(connection);
  } else {
    ++counters_.refused_connections;
  }
}

void Endpoint::forget_closed_connections() {
  const auto is_closed = [](const auto& connection) { return connection->is_closed(); };
  if (std::none_of(connections_.begin(), connections_.end(), is_closed)) return;
  accept_all();  // a peer that has ended may have sent its last bytes over another connection
  for (const auto& connection : connections_) {
    if (connection->is_closed()) note_closed(*connection);
  }
  std::erase_if(connections_, is_closed);
}

// False if the frame is malformed.
bool Endpoint::handle(Connection& connection, const FrameHeader& header,
                      std::span<const std::byte> payload) {
  using Kind = FrameHeader::Kind;
  if (header.kind == Kind::kHello) return handle_hello(connection, read_payload<Hello>(payload));
  PairConnection& from = pair(connection.peer());
  if (header.kind == Kind::kWelcome) return from.handle_welcome(connection);
  const auto verdict = from.judge_frame(connection);
  if (verdict != PairConnection::Verdict::kDeliver) {
    return verdict == PairConnection::Verdict::kSkip;
  }
  EndpointInbox* inbox = inbox_for(header.comm_id);
  if (inbox == nullptr) return true;  // of a communicator that no longer exists
  const int peer = connection.peer();
  switch (header.kind) {
    case Kind::kControl: {
      const auto message = read_payload<ControlMessage>(payload);
      if (!is_valid(message, world_.size()) || inbox->messages.size() >= kMaxMessages) return false;
      inbox->messages.emplace_back(peer, message);
      return true;
    }
    case Kind::kData:
      return inbox->stream(peer, options_.window_bytes).receive(header.position, payload);
    case Kind::kCredit:
      return inbox->stream(peer, options_.window_bytes).note_consumed_by_peer(header.position);
    default:
      return false;
  }
}

bool Endpoint::handle_hello(Connection& connection, const Hello& hello) {
  const bool is_welcome = hello.version == kSocketsVersion && hello.world == world_.id &&
                          hello.rank >= 0 && hello.rank < world_.size() &&
                          hello.rank != world_.rank && is_equal(hello.secret, world_.own().secret);
  if (!is_welcome || !pair(hello.rank).handle_hello(connection, hello.rank)) {
    connection.close("its hello was refused");  // counted as a refused connection
  }
  return true;
}

// Null if frames for this communicator are to be dropped.
EndpointInbox* Endpoint::inbox_for(uint64_t comm_id) {
  if (closed_ids_.contains(comm_id)) return nullptr;
  const auto found = inboxes_.find(comm_id);
  if (found != inboxes_.end()) return &found->second;
  const auto num_early = std::count_if(inboxes_.begin(), inboxes_.end(),
                                       [](const auto& entry) { return !entry.second.is_open; });
  if (static_cast<size_t>(num_early) >= kMaxEarlyCommunicators) {
    ++counters_.malformed_frames;
    return nullptr;
  }
  return &inboxes_[comm_id];
}

SocketsCounters Endpoint::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

int Endpoint::num_connections() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(
      std::count_if(connections_.begin(), connections_.end(),
                    [](const auto& one) { return one->is_known() && !one->is_closed(); }));
}

namespace {

constexpr std::chrono::seconds kExitTime{2};

struct Lingering {
  std::mutex mutex;
  std::vector<Socket> sockets;
};

constinit PerProcess<Lingering> lingering;

// Discards what has arrived. Returns whether the peer has closed its end.
bool is_closed_by_peer(const Socket& socket) {
  std::array<std::byte, 4096> discarded{};
  while (true) {
    const ssize_t got = recv(socket.descriptor(), discarded.data(), discarded.size(), MSG_DONTWAIT);
    if (got > 0) continue;
    return got == 0 || !is_temporary(errno);
  }
}

// Whether the peer's machine has all bytes.
bool is_delivered(const Socket& socket) {
  int num_unsent = 0;
  return ioctl(socket.descriptor(), SIOCOUTQ, &num_unsent) != 0 || num_unsent == 0;
}

void finish_at_exit() {
  Lingering& all = lingering.get();
  const std::lock_guard lock(all.mutex);
  auto& kept = all.sockets;
  const auto end = Clock::now() + kExitTime;
  const auto is_finished = [](const Socket& socket) {
    return is_closed_by_peer(socket) || is_delivered(socket);
  };
  while (std::erase_if(kept, is_finished), !kept.empty() && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void close_gently(std::vector<Socket> sockets) {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(finish_at_exit); });
  for (const Socket& socket : sockets) shutdown(socket.descriptor(), SHUT_WR);
  Lingering& all = lingering.get();
  const std::lock_guard lock(all.mutex);
  auto& kept = all.sockets;
  kept.insert(kept.end(), std::make_move_iterator(sockets.begin()),
              std::make_move_iterator(sockets.end()));
  std::erase_if(kept, is_closed_by_peer);
}

namespace {

constexpr std::chrono::seconds kFlushTime{10};
constexpr std::chrono::milliseconds kLook{10};

void flush(Endpoint& endpoint) {
  const auto end = Clock::now() + kFlushTime;
  while (endpoint.has_unsent() && Clock::now() < end) {
    endpoint.wait_for_sockets(kLook);
    endpoint.poll();
  }
}

}  // namespace

void flush_in_background(std::shared_ptr<Endpoint> endpoint) {
  if (!endpoint->has_unsent()) return;
  try {
    std::thread([endpoint = std::move(endpoint)] {
      try {
        flush(*endpoint);
      } catch (const std::exception&) {
        // The peers find out by their deadlines.
      }
    }).detach();
  } catch (const std::system_error&) {
    // Without a thread the peers find out by their deadlines.
  }
}

}  // namespace crossdock::comm
