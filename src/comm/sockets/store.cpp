#include "comm/sockets/store.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "comm/failure.hpp"
#include "comm/polled/control_message.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/endpoint.hpp"
#include "comm/sockets/socket.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"

namespace crossdock::comm {
namespace {

using std::chrono::milliseconds;

constexpr const char* kSetUp = "set-up";     // the operation in errors
constexpr milliseconds kLook{50};            // between checks of deadline and interrupt
constexpr milliseconds kAnswerTime{2000};    // for a store to accept; then the next port is tried
constexpr milliseconds kRequestTime{10000};  // for a connection to send its request
constexpr milliseconds kTellInterval{200};   // between messages about the missing ranks
constexpr milliseconds kFarewellTime{1000};  // to send the last messages
constexpr milliseconds kRefusalTime{5000};   // for refuse_exchange
constexpr ptrdiff_t kMaxStrangers = 64;      // connections without a valid request
constexpr size_t kMaxTold = kMaxNamedRanks + 1;  // missing ranks in one message
constexpr size_t kMaxRequestBytes =
    sizeof(StoreRequest) + std::max<size_t>(kMaxBlobBytes, sizeof(ControlMessage));

/// Ranks that a wait is for, and what for: "ranks 3, 5 to start".
struct Awaited {
  std::vector<int> ranks;
  std::string text;
};

Awaited to_start(std::vector<int> ranks) {
  std::string text = to_ranks_text(ranks) + " to start";
  return {.ranks = std::move(ranks), .text = std::move(text)};
}

/// How long this rank waits, and whom it tells.
class Patience {
 public:
  explicit Patience(const StoreArgs& args)
      : args_(args),
        begin_(Clock::now()),
        end_(deadline_after(begin_, args.deadline)),
        notice_(&args.on_wait, args.notice_after) {}

  /// Why the wait must end, if it must.
  std::optional<Failure> look(const Awaited& awaited) {
    if (args_.interrupt && args_.interrupt()) {
      return Failure{.code = ErrorCode::kCommunication,
                     .culprit = args_.rank,
                     .reporter = args_.rank,
                     .sequence = 0,
                     .operation = kSetUp,
                     .text = concat("interrupted while waiting for ", awaited.text)};
    }
    const auto now = Clock::now();
    if (now >= end_) {
      return Failure{
          .code = ErrorCode::kTimeout,
          .culprit = awaited.ranks.front(),
          .reporter = -1,
          .sequence = 0,
          .operation = kSetUp,
          .text = concat("waited ", to_seconds_text(args_.deadline), " for ", awaited.text,
                         "; are all processes running, with the same MASTER_ADDR, "
                         "MASTER_PORT and WORLD_SIZE?")};
    }
    if (notice_.is_due(now - begin_)) {
      notice_.say({.rank = args_.rank,
                   .size = args_.size,
                   .awaited = awaited.ranks,
                   .operation = kSetUp,
                   .waited = now - begin_,
                   .left = end_ - now});
    }
    return std::nullopt;
  }

 private:
  const StoreArgs& args_;
  const Clock::time_point begin_;
  const Clock::time_point end_;
  OnceNotice notice_;
};

std::vector<std::byte> bytes_of(const auto& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  return {bytes.begin(), bytes.end()};
}

template <typename Value>
std::optional<Value> value_at_front(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(Value)) return std::nullopt;
  Value value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

/// The failure in a ControlMessage, if that is what the bytes begin with.
std::optional<Failure> failure_in(std::span<const std::byte> bytes, int size) {
  const auto message = value_at_front<ControlMessage>(bytes);
  if (!message || message->kind != ControlMessage::Kind::kAbort || !is_valid(*message, size)) {
    return std::nullopt;
  }
  return failure_from(*message);
}

/// A connection with its unread and unsent bytes.
struct Peer {
  Socket socket;
  std::vector<std::byte> input;
  std::vector<std::byte> output;
  int rank = -1;  // known after a valid request
  Clock::time_point since = Clock::now();

  // At most max_bytes of input are kept. False if the connection has ended.
  bool read(size_t max_bytes) {
    std::byte buffer[4096];
    while (input.size() < max_bytes) {
      const size_t wanted = std::min(sizeof buffer, max_bytes - input.size());
      const ssize_t got = recv(socket.descriptor(), buffer, wanted, MSG_DONTWAIT);
      if (got == 0) return false;
      if (got < 0) return is_temporary(errno);
      input.insert(input.end(), buffer, buffer + got);
    }
    return true;
  }
  bool write() {
    while (!output.empty()) {
      const ssize_t sent =
          send(socket.descriptor(), output.data(), output.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) return is_temporary(errno);
      output.erase(output.begin(), output.begin() + sent);
    }
    return true;
  }
  void reply(StoreReply::Kind kind, std::span<const std::byte> payload) {
    append(output, bytes_of(StoreReply{.kind = kind, .payload_bytes = payload.size()}));
    append(output, payload);
  }
  // Gives up the socket, but leaves what was written to be read.
  void linger() {
    std::vector<Socket> sockets;
    sockets.push_back(std::move(socket));
    close_gently(std::move(sockets));
  }
  pollfd entry() const {
    return {.fd = socket.descriptor(),
            .events = static_cast<short>(output.empty() ? POLLIN : POLLIN | POLLOUT),
            .revents = 0};
  }
  bool wait(milliseconds time) const {
    pollfd waiting = entry();
    return ::poll(&waiting, 1, static_cast<int>(time.count())) > 0;
  }
};

/// Rank 0's side.
class Store {
 public:
  explicit Store(const StoreArgs& args)
      : args_(args), listener_(listen(args)), blobs_(static_cast<size_t>(args.size)) {
    blobs_.front() = args.blob;
    missing_.resize(blobs_.size() - 1);
    std::iota(missing_.begin(), missing_.end(), 1);
  }

  std::vector<std::vector<std::byte>> serve() {
    Patience patience(args_);
    while (!missing_.empty()) {
      if (auto failure = patience.look(to_start(missing_))) give_up(*failure);
      look();
      if (failure_) pass_on(*failure_);
      tell_who_is_missing();
    }
    send_blobs();
    while (has_unsent()) {
      auto failure = patience.look({.ranks = {0}, .text = "the others to take the addresses"});
      // A rank that does not take them is found to be late when the ranks join.
      if (failure && failure->code == ErrorCode::kTimeout) break;
      if (failure) give_up(*failure);
      look();
    }
    return blobs_;
  }

  /// Tells the ranks that have arrived, and those that do so within kRefusalTime, why the set-up
  /// has failed.
  void refuse(const Failure& failure) {
    failure_ = failure;
    tell_all(failure);
    const auto end =
        Clock::now() + std::min<std::chrono::nanoseconds>(args_.deadline, kRefusalTime);
    while (!missing_.empty() && Clock::now() < end) look();
    say_farewell();
  }

 private:
  static Socket listen(const StoreArgs& args) {
    SocketAddress address = interface_towards(args.host);
    for (int port = args.port; port < args.port + kNumStorePorts && port <= 65535; ++port) {
      address.port = port;
      if (auto listener = listen_at(address)) return std::move(*listener);
    }
    throw Error(ErrorCode::kCommunication,
                concat("rank 0 finds no free port from ", args.port, " to ",
                       args.port + kNumStorePorts - 1, "; set MASTER_PORT to another"));
  }

  void look() {
    std::vector<pollfd> entries;
    const int listener = may_accept_ ? listener_.descriptor() : -1;  // poll ignores -1
    entries.push_back({.fd = listener, .events = POLLIN, .revents = 0});
    for (const Peer& peer : peers_) entries.push_back(peer.entry());
    ::poll(entries.data(), entries.size(), static_cast<int>(kLook.count()));
    while (may_accept_) {
      auto socket = accept_from(listener_);
      if (!socket) {
        if (errno == EMFILE || errno == ENFILE) stop_accepting(errno);
        break;
      }
      peers_.push_back({.socket = std::move(*socket), .input = {}, .output = {}});
      handle_last();
    }
    std::erase_if(peers_, [&](Peer& peer) { return !handle(peer); });
  }

  // The set-up fails: a rank that is not accepted cannot be told from one that does not start.
  void stop_accepting(int error) {
    may_accept_ = false;
    note_failure(Failure{.code = ErrorCode::kCommunication,
                         .culprit = 0,
                         .reporter = -1,
                         .sequence = 0,
                         .operation = kSetUp,
                         .text = concat("rank 0 cannot accept another connection: ",
                                        std::strerror(error), "; it needs one for every rank, so ",
                                        "raise its limit on open files (ulimit -n)")});
  }

  // The request of a rank is most likely there already. Strangers that are silent must not keep the
  // ranks out: the oldest one makes room.
  void handle_last() {
    if (!handle(peers_.back())) {
      peers_.pop_back();
      return;
    }
    const auto is_stranger = [](const Peer& peer) { return peer.rank < 0; };
    if (std::count_if(peers_.begin(), peers_.end(), is_stranger) <= kMaxStrangers) return;
    peers_.erase(std::find_if(peers_.begin(), peers_.end(), is_stranger));
  }

  // False if the connection must be dropped.
  bool handle(Peer& peer) {
    if (peer.rank >= 0) return handle_rank(peer);
    if (Clock::now() - peer.since > kRequestTime) return false;
    if (!peer.read(kMaxRequestBytes)) return false;
    const auto request = value_at_front<StoreRequest>(peer.input);
    if (!request) return true;
    if (is_of_other_version(*request, args_)) return refuse_version(peer, *request);
    if (!is_valid(*request, args_)) return false;
    const size_t payload_bytes =
        request->blob_bytes > 0 ? request->blob_bytes : sizeof(ControlMessage);
    if (peer.input.size() < sizeof *request + payload_bytes) return true;
    if (peer.input.size() > sizeof *request + payload_bytes) return false;
    const std::vector<std::byte> payload(peer.input.begin() + sizeof *request, peer.input.end());
    peer.input.clear();
    if (request->blob_bytes == 0) {
      const auto failure = failure_in(payload, args_.size);
      if (!failure) return false;
      std::erase(missing_, request->rank);
      note_failure(*failure);
      return dismiss(peer, StoreReply::Kind::kFailed, payload);
    }
    peer.rank = request->rank;
    accept_blob(peer, payload);
    return peer.write();
  }

  // A rank sends nothing more, unless it gives up.
  bool handle_rank(Peer& peer) {
    const bool is_open = peer.read(sizeof(ControlMessage));
    if (peer.input.size() == sizeof(ControlMessage)) {
      note_failure(failure_in(peer.input, args_.size));
      return false;
    }
    return is_open && peer.write();
  }

  void note_failure(std::optional<Failure> failure) {
    if (!failure_) failure_ = std::move(failure);
  }

  bool refuse_version(Peer& peer, const StoreRequest& request) {
    const std::string text =
        concat("rank ", request.rank, " runs another version of Crossdock than rank 0 (protocol ",
               request.version, ", not ", kSocketsVersion, "); all ranks must run the same build");
    std::erase(missing_, request.rank);
    note_failure(Failure{.code = ErrorCode::kMismatch,
                         .culprit = request.rank,
                         .reporter = -1,
                         .sequence = 0,
                         .operation = kSetUp,
                         .text = text});
    return dismiss(peer, StoreReply::Kind::kRefused, std::as_bytes(std::span(text)));
  }

  // Sends a last reply. Returns false: the connection must be dropped.
  static bool dismiss(Peer& peer, StoreReply::Kind kind, std::span<const std::byte> payload) {
    peer.reply(kind, payload);
    peer.write();
    peer.linger();
    return false;
  }

  void accept_blob(Peer& peer, std::vector<std::byte> blob) {
    auto& place = blobs_[static_cast<size_t>(peer.rank)];
    if (!place.empty() && place != blob) {
      const std::string text = concat("two processes claim to be rank ", peer.rank, " of ",
                                      args_.size, "; give every process a RANK of its own");
      peer.reply(StoreReply::Kind::kRefused, std::as_bytes(std::span(text)));
      return;
    }
    place = std::move(blob);
    std::erase(missing_, peer.rank);
    if (failure_) {
      peer.reply(StoreReply::Kind::kFailed, bytes_of(abort_message(*failure_)));
    } else {
      send_missing(peer);
    }
  }

  void send_missing(Peer& peer) const {
    const std::span<const int> all(missing_);
    peer.reply(StoreReply::Kind::kWaiting,
               std::as_bytes(all.first(std::min(all.size(), kMaxTold))));
  }

  void tell_who_is_missing() {
    const auto now = Clock::now();
    if (missing_.size() == num_missing_told_ || now - last_told_ < kTellInterval) return;
    num_missing_told_ = missing_.size();
    last_told_ = now;
    for (Peer& peer : peers_) {
      if (peer.rank < 0) continue;
      send_missing(peer);
      peer.write();
    }
  }

  void send_blobs() {
    std::vector<std::byte> payload;
    for (const auto& blob : blobs_) {
      append(payload, bytes_of(static_cast<uint32_t>(blob.size())));
      append(payload, blob);
    }
    for (Peer& peer : peers_) {
      if (peer.rank < 0) continue;
      peer.reply(StoreReply::Kind::kBlobs, payload);
      peer.write();
    }
  }

  bool has_unsent() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return !peer.output.empty(); });
  }

  void tell_all(const Failure& failure) {
    for (Peer& peer : peers_) {
      if (peer.rank < 0) continue;
      peer.reply(StoreReply::Kind::kFailed, bytes_of(abort_message(failure)));
      peer.write();
    }
  }

  [[noreturn]] void give_up(const Failure& failure) {
    tell_all(failure);
    say_farewell();
    throw to_error(failure, args_.rank, args_.size);
  }

  // A rank has given up. If it cannot take part, ranks that have not arrived yet learn it too.
  [[noreturn]] void pass_on(const Failure& failure) {
    const bool has_waited =
        failure.code == ErrorCode::kTimeout || failure.code == ErrorCode::kCommunication;
    if (has_waited) give_up(failure);
    refuse(failure);
    throw to_error(failure, args_.rank, args_.size);
  }

  // Sends what has not been sent. The sockets linger: closing one that has unread bytes would
  // discard what its peer has not read yet.
  void say_farewell() {
    const auto end = Clock::now() + kFarewellTime;
    while (has_unsent() && Clock::now() < end) look();
    for (Peer& peer : peers_) peer.linger();
    peers_.clear();
  }

  const StoreArgs& args_;
  const Socket listener_;
  std::vector<std::vector<std::byte>> blobs_;  // [P]; empty: not received yet
  std::vector<int> missing_;                   // ranks without a blob, ascending
  size_t num_missing_told_ = 0;
  Clock::time_point last_told_ = Clock::now();
  std::optional<Failure> failure_;  // of a rank that gave up
  bool may_accept_ = true;
  std::vector<Peer> peers_;
};

/// The other side: asks one port after the other until the store of its job answers.
class Client {
 public:
  Client(const StoreArgs& args, std::vector<std::byte> payload)
      : args_(args),
        request_(bytes_of(StoreRequest{.magic = StoreRequest::kMagic,
                                       .version = kSocketsVersion,
                                       .key = args.key,
                                       .rank = args.rank,
                                       .size = args.size,
                                       .blob_bytes = static_cast<uint32_t>(args.blob.size())})),
        patience_(args) {
    append(request_, payload);
  }

  /// Throws if the wait is interrupted or too long, or if a rank gives up.
  std::vector<std::vector<std::byte>> ask_all_ports() {
    SocketAddress address = address_of_host(args_.host, args_.port);
    while (true) {
      for (int i = 0; i < kNumStorePorts && args_.port + i <= 65535; ++i) {
        address.port = args_.port + i;
        awaited_ = store_;
        auto blobs = ask(address);
        if (!blobs.empty()) return blobs;
      }
      awaited_ = store_;
      if (auto failure = patience_.look(awaited_)) throw to_error(*failure, args_.rank, args_.size);
      ::poll(nullptr, 0, static_cast<int>(kLook.count()));
    }
  }

 private:
  // Empty if there is no store for this job, or it went away.
  std::vector<std::vector<std::byte>> ask(const SocketAddress& address) {
    int error = 0;
    Peer store{.socket = start_connecting(address, error), .input = {}, .output = request_};
    if (error != 0) return {};
    bool is_accepted = false;
    const size_t max_reply =
        std::max(sizeof(ControlMessage),
                 static_cast<size_t>(args_.size) * (kMaxBlobBytes + sizeof(uint32_t)));
    while (true) {
      if (auto failure = patience_.look(awaited_)) give_up(store, *failure, is_accepted);
      const bool is_ready = store.wait(kLook);
      if (!is_accepted && Clock::now() - store.since > kAnswerTime) return {};
      if (!is_ready) continue;
      if (connect_error(store.socket) != 0 || !store.write()) return {};
      const bool is_open = store.read(sizeof(StoreReply) + max_reply);
      while (const auto reply = value_at_front<StoreReply>(store.input)) {
        if (reply->magic != StoreReply::kMagic || reply->payload_bytes > max_reply) return {};
        if (store.input.size() < sizeof *reply + reply->payload_bytes) break;
        const auto begin = store.input.begin() + sizeof *reply;
        const auto end = begin + static_cast<ptrdiff_t>(reply->payload_bytes);
        const std::vector<std::byte> payload(begin, end);
        store.input.erase(store.input.begin(), end);
        if (reply->kind == StoreReply::Kind::kBlobs) return read_blobs(payload, args_.size);
        handle(reply->kind, payload);
        is_accepted = true;
      }
      if (!is_open) return {};
    }
  }

  void handle(StoreReply::Kind kind, const std::vector<std::byte>& payload) {
    if (kind == StoreReply::Kind::kRefused) {
      throw Error(ErrorCode::kMismatch,
                  std::string(reinterpret_cast<const char*>(payload.data()), payload.size()),
                  {.culprit = args_.rank, .sequence = 0, .operation = kSetUp});
    }
    if (kind == StoreReply::Kind::kFailed) {
      if (const auto failure = failure_in(payload, args_.size)) {
        throw to_error(*failure, args_.rank, args_.size);
      }
    }
    if (kind == StoreReply::Kind::kWaiting && payload.size() % sizeof(int) == 0) {
      std::vector<int> missing(payload.size() / sizeof(int));
      std::memcpy(missing.data(), payload.data(), payload.size());
      awaited_ = missing.empty() ? store_ : to_start(std::move(missing));
    }
  }

  // Tells a store that has accepted this rank.
  [[noreturn]] void give_up(Peer& store, const Failure& failure, bool is_accepted) const {
    if (is_accepted) {
      append(store.output, bytes_of(abort_message(failure)));
      store.write();
      store.linger();
    }
    throw to_error(failure, args_.rank, args_.size);
  }

  const StoreArgs& args_;
  std::vector<std::byte> request_;
  Patience patience_;
  const Awaited store_{.ranks = {0},
                       .text = concat("rank 0 at ", args_.host, ", port ", args_.port)};
  Awaited awaited_ = store_;
};

}  // namespace

bool is_of_other_version(const StoreRequest& request, const StoreArgs& args) {
  return request.magic == StoreRequest::kMagic && request.version != kSocketsVersion &&
         request.key == args.key && request.size == args.size && request.rank > 0 &&
         request.rank < args.size;
}

bool is_valid(const StoreRequest& request, const StoreArgs& args) {
  return request.magic == StoreRequest::kMagic && request.version == kSocketsVersion &&
         request.key == args.key && request.size == args.size && request.rank > 0 &&
         request.rank < args.size && request.blob_bytes <= kMaxBlobBytes && request.reserved == 0;
}

std::vector<std::vector<std::byte>> read_blobs(const std::vector<std::byte>& payload, int size) {
  std::vector<std::vector<std::byte>> blobs;
  std::span<const std::byte> rest = payload;
  for (int rank = 0; rank < size; ++rank) {
    const auto num_bytes = value_at_front<uint32_t>(rest);
    if (!num_bytes || *num_bytes > kMaxBlobBytes || rest.size() < sizeof(uint32_t) + *num_bytes) {
      return {};
    }
    const auto blob = rest.subspan(sizeof(uint32_t), *num_bytes);
    blobs.emplace_back(blob.begin(), blob.end());
    rest = rest.subspan(sizeof(uint32_t) + *num_bytes);
  }
  if (!rest.empty()) return {};
  return blobs;
}

std::vector<std::vector<std::byte>> exchange_blobs(const StoreArgs& args) {
  if (args.size == 1) return {args.blob};
  if (args.rank == 0) return Store(args).serve();
  return Client(args, args.blob).ask_all_ports();
}

void refuse_exchange(const StoreArgs& args, const Error& cause) noexcept {
  if (args.size == 1) return;
  try {
    Failure failure = failure_from(cause, args.rank);
    failure.code = cause.code();
    failure.operation = kSetUp;
    StoreArgs brief = args;
    brief.deadline = std::min<std::chrono::nanoseconds>(args.deadline, kRefusalTime);
    brief.blob.clear();
    brief.on_wait = {};
    if (args.rank == 0) {
      Store(brief).refuse(failure);
    } else {
      Client(brief, bytes_of(abort_message(failure))).ask_all_ports();
    }
  } catch (const std::exception&) {
    // The others find out by their deadlines.
  }
}

}  // namespace crossdock::comm
