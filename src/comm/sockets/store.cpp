#include "comm/sockets/store.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "comm/deadlines.hpp"
#include "comm/sockets/addresses.hpp"
#include "comm/sockets/blob.hpp"
#include "core/check.hpp"

namespace crossdock::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLook{50};            // between checks of deadline and interrupt
constexpr milliseconds kAnswerTime{2000};    // for a store to accept; then the next port is tried
constexpr milliseconds kRequestTime{10000};  // for a connection to send its request
constexpr size_t kMaxStrangers = 64;         // connections without a valid request

/// Ends a wait by throwing.
class Patience {
 public:
  explicit Patience(const StoreArgs& args)
      : args_(args), end_(deadline_after(Clock::now(), args.deadline)) {}
  void check(const std::string& awaited) const {
    const auto start = concat("rank ", args_.rank, " of ", args_.size, ": ");
    if (args_.interrupt && args_.interrupt()) {
      throw Error(ErrorCode::kCommunication,
                  concat(start, "interrupted while waiting for ", awaited));
    }
    if (Clock::now() < end_) return;
    throw Error(ErrorCode::kTimeout,
                concat(start, "waited ", to_seconds_text(args_.deadline), " for ", awaited,
                       "; are all processes running, with the same MASTER_ADDR, MASTER_PORT and "
                       "WORLD_SIZE?"),
                {.culprit = -1, .sequence = 0, .operation = "set-up"});
  }

 private:
  const StoreArgs& args_;
  const Clock::time_point end_;
};

template <typename Value>
void append(std::vector<std::byte>& bytes, const Value& value) {
  const auto more = std::as_bytes(std::span(&value, 1));
  bytes.insert(bytes.end(), more.begin(), more.end());
}

void append(std::vector<std::byte>& bytes, const std::vector<std::byte>& more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

template <typename Value>
std::optional<Value> value_at_front(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(Value)) return std::nullopt;
  Value value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
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
  bool wait(milliseconds time) const {
    pollfd entry{.fd = socket.descriptor(),
                 .events = static_cast<short>(output.empty() ? POLLIN : POLLIN | POLLOUT),
                 .revents = 0};
    return ::poll(&entry, 1, static_cast<int>(time.count())) > 0;
  }
};

/// Rank 0's side.
class Store {
 public:
  explicit Store(const StoreArgs& args)
      : args_(args), listener_(listen(args)), blobs_(static_cast<size_t>(args.size)) {
    blobs_.front() = args.blob;
  }

  std::vector<std::vector<std::byte>> serve() {
    const Patience patience(args_);
    while (!missing().empty()) {
      patience.check(missing());
      look();
    }
    send_blobs();
    while (std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return !peer.output.empty(); })) {
      patience.check("the other processes to take the addresses");
      look();
    }
    return blobs_;
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

  /// "ranks 3, 5 to start"; empty if all have arrived.
  std::string missing() const {
    std::string ranks;
    int num_missing = 0;
    for (size_t rank = 0; rank < blobs_.size(); ++rank) {
      if (!blobs_[rank].empty()) continue;
      if (++num_missing <= 8) ranks += concat(num_missing > 1 ? ", " : "", rank);
    }
    if (num_missing == 0) return "";
    return concat(num_missing > 1 ? "ranks " : "rank ", ranks, num_missing > 8 ? ", ..." : "",
                  " to start");
  }

  void look() {
    std::vector<pollfd> entries;
    entries.push_back({.fd = listener_.descriptor(), .events = POLLIN, .revents = 0});
    for (const Peer& peer : peers_) {
      entries.push_back(
          {.fd = peer.socket.descriptor(),
           .events = static_cast<short>(peer.output.empty() ? POLLIN : POLLIN | POLLOUT),
           .revents = 0});
    }
    ::poll(entries.data(), entries.size(), static_cast<int>(kLook.count()));
    std::erase_if(peers_, [&](Peer& peer) { return !handle(peer); });
    const auto num_strangers =
        std::count_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.rank < 0; });
    for (auto room = static_cast<ptrdiff_t>(kMaxStrangers) - num_strangers; room > 0; --room) {
      auto socket = accept_from(listener_);
      if (!socket) break;
      peers_.push_back({.socket = std::move(*socket), .input = {}, .output = {}});
    }
  }

  // False if the connection must be dropped.
  bool handle(Peer& peer) {
    if (peer.rank >= 0) {
      peer.input.clear();
      return peer.read(1) && peer.input.empty() && peer.write();  // sends nothing more
    }
    if (Clock::now() - peer.since > kRequestTime) return false;
    if (!peer.read(sizeof(StoreRequest) + kMaxBlobBytes)) return false;
    const auto request = value_at_front<StoreRequest>(peer.input);
    if (!request) return true;
    if (!is_valid(*request, args_)) return false;
    if (peer.input.size() < sizeof *request + request->blob_bytes) return true;
    if (peer.input.size() > sizeof *request + request->blob_bytes) return false;
    peer.rank = request->rank;
    accept_blob(peer, {peer.input.begin() + sizeof *request, peer.input.end()});
    return peer.write();
  }

  void accept_blob(Peer& peer, std::vector<std::byte> blob) {
    auto& place = blobs_[static_cast<size_t>(peer.rank)];
    if (place.empty() || place == blob) {
      place = std::move(blob);
      append(peer.output, StoreReply{});
      return;
    }
    const std::string text = concat("two processes claim to be rank ", peer.rank, " of ",
                                    args_.size, "; give every process a RANK of its own");
    append(peer.output,
           StoreReply{.kind = StoreReply::Kind::kRefused, .payload_bytes = text.size()});
    for (const char one : text) peer.output.push_back(static_cast<std::byte>(one));
  }

  void send_blobs() {
    std::vector<std::byte> payload;
    for (const auto& blob : blobs_) {
      append(payload, static_cast<uint32_t>(blob.size()));
      append(payload, blob);
    }
    for (Peer& peer : peers_) {
      if (peer.rank < 0) continue;
      append(peer.output,
             StoreReply{.kind = StoreReply::Kind::kBlobs, .payload_bytes = payload.size()});
      append(peer.output, payload);
      peer.write();
    }
  }

  const StoreArgs& args_;
  const Socket listener_;
  std::vector<std::vector<std::byte>> blobs_;  // [P]; empty: not received yet
  std::vector<Peer> peers_;
};

/// Asks one port. Empty if there is no store for this job, or it went away.
std::vector<std::vector<std::byte>> ask(const StoreArgs& args, const SocketAddress& address,
                                        const Patience& patience) {
  int error = 0;
  Peer store{.socket = start_connecting(address, error), .input = {}, .output = {}};
  if (error != 0) return {};
  append(store.output, StoreRequest{.magic = StoreRequest::kMagic,
                                    .version = kSocketsVersion,
                                    .key = args.key,
                                    .rank = args.rank,
                                    .size = args.size,
                                    .blob_bytes = static_cast<uint32_t>(args.blob.size())});
  append(store.output, args.blob);
  const size_t max_reply =
      2 * sizeof(StoreReply) + static_cast<size_t>(args.size) * (kMaxBlobBytes + sizeof(uint32_t));
  bool is_accepted = false;
  while (true) {
    patience.check(concat("rank 0 at ", address.text()));
    const bool is_ready = store.wait(kLook);
    if (!is_accepted && Clock::now() - store.since > kAnswerTime) return {};
    if (!is_ready) continue;
    if (connect_error(store.socket) != 0 || !store.write()) return {};
    const bool is_open = store.read(max_reply);
    while (const auto reply = value_at_front<StoreReply>(store.input)) {
      if (reply->magic != StoreReply::kMagic || reply->payload_bytes > max_reply) return {};
      if (store.input.size() < sizeof *reply + reply->payload_bytes) break;
      const auto begin = store.input.begin() + sizeof *reply;
      const auto end = begin + static_cast<ptrdiff_t>(reply->payload_bytes);
      const std::vector<std::byte> payload(begin, end);
      store.input.erase(store.input.begin(), end);
      if (reply->kind == StoreReply::Kind::kBlobs) return read_blobs(payload, args.size);
      if (reply->kind == StoreReply::Kind::kRefused) {
        throw Error(ErrorCode::kMismatch,
                    std::string(reinterpret_cast<const char*>(payload.data()), payload.size()),
                    {.culprit = args.rank, .sequence = 0, .operation = "set-up"});
      }
      is_accepted = true;
    }
    if (!is_open) return {};
  }
}

}  // namespace

bool is_valid(const StoreRequest& request, const StoreArgs& args) {
  return request.magic == StoreRequest::kMagic && request.version == kSocketsVersion &&
         request.key == args.key && request.size == args.size && request.rank > 0 &&
         request.rank < args.size && request.blob_bytes > 0 &&
         request.blob_bytes <= kMaxBlobBytes && request.reserved == 0;
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
  const Patience patience(args);
  SocketAddress address = address_of_host(args.host, args.port);
  while (true) {
    for (int i = 0; i < kNumStorePorts && args.port + i <= 65535; ++i) {
      address.port = args.port + i;
      auto blobs = ask(args, address, patience);
      if (!blobs.empty()) return blobs;
    }
    patience.check(concat("rank 0 at ", args.host, ", port ", args.port));
    ::poll(nullptr, 0, static_cast<int>(kLook.count()));
  }
}

}  // namespace crossdock::comm
