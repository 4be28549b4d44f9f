// Your own communicator, checked by the suite that checks Crossdock's communicators.
//
// "sockets" connects forked processes: every pair of ranks shares a Unix socket that keeps packets
// whole. A packet names its communicator, so subgroups use the same sockets, and packets of a
// failed exchange do no harm.
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <crossdock/crossdock.hpp>
#include <crossdock/testing/conformance.hpp>
#include <crossdock/testing/faults.hpp>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <set>

using namespace crossdock;

namespace {

using Clock = std::chrono::steady_clock;
enum class Kind : uint8_t { kData, kFailed, kLeft };

struct Packet {
  static constexpr size_t kMaxBytes = 32 << 10;

  uint64_t communicator = 0;
  Kind kind = Kind::kData;
  ErrorCode code = ErrorCode::kPeerFailed;  // of kFailed, like culprit, sequence and operation
  int culprit = -1;
  uint64_t sequence = 0;
  char operation[24] = "";
  size_t num_bytes = 0;
  std::byte bytes[kMaxBytes] = {};  // of kFailed and kLeft: the reason, as text

  std::string text() const { return {reinterpret_cast<const char*>(bytes), num_bytes}; }
};

// The sockets of one process, which all its communicators share.
class Sockets {
 public:
  explicit Sockets(std::vector<int> descriptors) : descriptors_(std::move(descriptors)) {}
  ~Sockets() { std::for_each(descriptors_.begin(), descriptors_.end(), close); }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  bool is_closed(size_t process) const { return descriptors_[process] < 0; }

  // Sends all of a packet or nothing; never waits.
  bool try_send(size_t process, const Packet& packet) const {
    const size_t used = offsetof(Packet, bytes) + packet.num_bytes;
    return send(descriptors_[process], &packet, used, MSG_DONTWAIT | MSG_NOSIGNAL) > 0;
  }

  // Waits, for 10 ms at most, until a packet arrives or one of `blocked` can be sent to again.
  void wait_for_packets(const std::set<size_t>& blocked) {
    std::vector<pollfd> polled;
    for (size_t p = 0; p < descriptors_.size(); ++p) {
      const int events = blocked.contains(p) ? POLLIN | POLLOUT : POLLIN;
      polled.push_back({descriptors_[p], static_cast<short>(events), 0});
    }
    poll(polled.data(), polled.size(), 10);
    for (size_t p = 0; p < descriptors_.size(); ++p) {
      while ((polled[p].revents & ~POLLOUT) != 0 && receive(p)) continue;
    }
  }

  // Packets of a communicator that have arrived from a process, in the order they were sent.
  std::deque<std::unique_ptr<Packet>>& inbox(uint64_t communicator, size_t process) {
    return inboxes_[communicator][process];
  }
  void close_inbox(uint64_t communicator) {
    inboxes_.erase(communicator);
    closed_.insert(communicator);
  }

 private:
  bool receive(size_t process) {
    auto packet = std::make_unique<Packet>();
    const ssize_t received =
        recv(descriptors_[process], packet.get(), sizeof(Packet), MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (received <= 0) {  // the process has ended
      close(std::exchange(descriptors_[process], -1));
      return false;
    }
    const uint64_t communicator = packet->communicator;
    if (!closed_.contains(communicator)) inbox(communicator, process).push_back(std::move(packet));
    return true;
  }

  std::vector<int> descriptors_;  // by process; -1: this process, or one that has ended
  std::map<uint64_t, std::map<size_t, std::deque<std::unique_ptr<Packet>>>> inboxes_;
  std::set<uint64_t> closed_;
};

class SocketCommunicator final : public Communicator {
 public:
  // `processes`: of its ranks. `key` is identical on its ranks and differs from all others.
  SocketCommunicator(std::shared_ptr<Sockets> sockets, std::vector<size_t> processes, int rank,
                     Topology topology, const std::string& key)
      : sockets_(std::move(sockets)),
        processes_(std::move(processes)),
        rank_(rank),
        topology_(std::move(topology)),
        key_(key),
        id_(std::hash<std::string>{}(key)) {}
  ~SocketCommunicator() override {
    leave("it returned or was destroyed");
    sockets_->close_inbox(id_);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(processes_.size()); }
  std::string_view name() const override { return "sockets"; }
  const Topology& topology() const override { return topology_; }

  void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                    std::span<const int64_t> recv_offsets, const WaitContext& wait) override {
    std::vector<Lane> lanes;
    for (size_t r = 0; r < processes_.size(); ++r) {
      lanes.push_back(
          {{send.data, static_cast<size_t>(send.num_bytes)}, block(recv, recv_offsets, r)});
    }
    exchange(lanes, wait);
  }

  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait) override {
    std::vector<Lane> lanes;
    for (size_t r = 0; r < processes_.size(); ++r) {
      lanes.push_back({block(send, send_offsets, r), block(recv, recv_offsets, r)});
    }
    exchange(lanes, wait);
  }

  // The members derive the same key without a message, so this works after a failure too.
  std::unique_ptr<Communicator> subgroup(std::span<const int> members) override {
    std::vector<size_t> processes;
    std::string key = key_ + "/";
    for (const int member : members) {
      processes.push_back(processes_[static_cast<size_t>(member)]);
      key += std::to_string(member) + ",";
    }
    key += std::to_string(num_subgroups_[key]++);
    const auto rank = std::find(members.begin(), members.end(), rank_) - members.begin();
    return std::make_unique<SocketCommunicator>(
        sockets_, std::move(processes), static_cast<int>(rank), topology_.subset(members), key);
  }

  void abort(const Error& cause) override {
    const ErrorContext& context = cause.context();
    Packet packet{.kind = Kind::kFailed,
                  .code = cause.code(),
                  .culprit = context.culprit < 0 ? rank_ : context.culprit,
                  .sequence = context.sequence};
    std::strncpy(packet.operation, context.operation, sizeof packet.operation - 1);
    tell_peers(packet, cause.what());
  }

  void leave(std::string_view reason) override {
    Packet packet{.kind = Kind::kLeft};
    if (!std::exchange(has_left_, true)) tell_peers(packet, reason);
  }

 private:
  // What remains to be sent to and received from a rank. A sent packet is a copy in the kernel, so
  // nothing refers to this memory after an exchange has ended or failed; otherwise
  // SharedBytes::owner would have to be kept.
  struct Lane {
    std::span<const std::byte> send;
    std::span<std::byte> recv;
    bool has_arrived = false;
  };

  static std::span<std::byte> block(const SharedBytes& bytes, std::span<const int64_t> offsets,
                                    size_t r) {
    return {bytes.data + offsets[r], static_cast<size_t>(offsets[r + 1] - offsets[r])};
  }

  void exchange(std::vector<Lane>& lanes, const WaitContext& wait) {
    Lane& own = lanes[static_cast<size_t>(rank_)];
    std::copy(own.send.begin(), own.send.end(), own.recv.begin());
    own = {};
    const Clock::time_point begin = Clock::now();
    Clock::time_point last_progress = begin;
    while (true) {
      std::set<size_t> blocked;
      int pending = -1;  // a rank that keeps this one waiting
      for (size_t r = 0; r < lanes.size(); ++r) {
        if (advance(r, lanes[r], wait)) last_progress = Clock::now();
        if (!lanes[r].send.empty()) blocked.insert(processes_[r]);
        if (!lanes[r].send.empty() || !lanes[r].recv.empty()) pending = static_cast<int>(r);
      }
      if (pending < 0) return;
      look_for_failures(lanes, wait);
      const bool is_idle = Clock::now() - last_progress > wait.progress;
      const bool has_arrived = lanes[static_cast<size_t>(pending)].has_arrived;
      if (is_idle && (has_arrived || Clock::now() - begin > wait.arrival)) {
        fail(ErrorCode::kTimeout, pending, "did not arrive or make progress in time", wait);
      }
      sockets_->wait_for_packets(blocked);
    }
  }

  // Sends and receives what can be without waiting. Returns whether anything moved.
  bool advance(size_t r, Lane& lane, const WaitContext& wait) {
    bool moved = false;
    Packet packet{.communicator = id_};
    while (!lane.send.empty()) {
      packet.num_bytes = std::min(lane.send.size(), Packet::kMaxBytes);
      std::memcpy(packet.bytes, lane.send.data(), packet.num_bytes);
      if (!sockets_->try_send(processes_[r], packet)) break;
      lane.send = lane.send.subspan(packet.num_bytes);
      moved = true;
    }
    auto& inbox = sockets_->inbox(id_, processes_[r]);
    while (!lane.recv.empty() && !inbox.empty() && inbox.front()->kind == Kind::kData) {
      const std::unique_ptr<Packet> arrived = std::move(inbox.front());
      inbox.pop_front();
      if (arrived->num_bytes != std::min(lane.recv.size(), Packet::kMaxBytes)) {
        fail(ErrorCode::kCommunication, static_cast<int>(r), "sent an unexpected size", wait);
      }
      std::memcpy(lane.recv.data(), arrived->bytes, arrived->num_bytes);
      lane.recv = lane.recv.subspan(arrived->num_bytes);
      lane.has_arrived = moved = true;
    }
    return moved;
  }

  // A rank that gave up ends every wait; one that left or died ends the waits for it.
  void look_for_failures(std::span<const Lane> lanes, const WaitContext& wait) {
    for (size_t r = 0; r < lanes.size(); ++r) {
      const int rank = static_cast<int>(r);
      const bool is_pending = !lanes[r].send.empty() || !lanes[r].recv.empty();
      for (const auto& packet : sockets_->inbox(id_, processes_[r])) {
        if (packet->kind == Kind::kFailed) {
          static std::set<std::string> names;  // ErrorContext needs names that stay valid
          throw Error(
              packet->code, "rank " + std::to_string(rank) + " gave up: " + packet->text(),
              {packet->culprit, packet->sequence, names.insert(packet->operation).first->c_str()});
        }
        if (packet->kind == Kind::kLeft && is_pending) {
          fail(ErrorCode::kPeerFailed, rank, "left (" + packet->text() + ")", wait);
        }
      }
      if (is_pending && sockets_->is_closed(processes_[r])) {
        fail(ErrorCode::kPeerFailed, rank, "left (its process has ended)", wait);
      }
    }
  }

  [[noreturn]] static void fail(ErrorCode code, int culprit, const std::string& what,
                                const WaitContext& wait) {
    throw Error(code,
                "rank " + std::to_string(culprit) + " " + what + " in " + wait.operation +
                    " (call " + std::to_string(wait.sequence) + ")",
                {culprit, wait.sequence, wait.operation});
  }

  void tell_peers(Packet& packet, std::string_view text) {
    packet.communicator = id_;
    packet.num_bytes = std::min(text.size(), Packet::kMaxBytes);
    std::memcpy(packet.bytes, text.data(), packet.num_bytes);
    for (size_t r = 0; r < processes_.size(); ++r) {
      // If a socket is full, that peer finds out at its deadline.
      if (static_cast<int>(r) != rank_) sockets_->try_send(processes_[r], packet);
    }
  }

  const std::shared_ptr<Sockets> sockets_;
  const std::vector<size_t> processes_;  // [P]
  const int rank_;
  const Topology topology_;
  const std::string key_;
  const uint64_t id_;
  bool has_left_ = false;
  std::map<std::string, int> num_subgroups_;  // by members
};

// Checks two strategies and three faults on two nodes of two ranks, and asks "auto" for its choice.
size_t judge(Group& group) {
  size_t num_failures = 0;
  const auto report = [&](const std::string& what, const std::string& message) {
    ++num_failures;
    std::printf("rank %d: %s: %s\n", group.rank(), what.c_str(), message.c_str());
  };
  std::vector<conformance::Check> checks = conformance::list_checks();
  std::erase_if(checks, [](const conformance::Check& check) { return !check.is_quick; });
  for (const char* name : {"alltoall", "hierarchical"}) {
    const auto strategy = [&] { return make_strategy(name); };
    for (const auto& failure : conformance::run_checks(group, strategy, checks).failures) {
      report(failure.check, failure.message);
    }
  }
  using conformance::FaultKind;
  for (const FaultKind kind : {FaultKind::kThrows, FaultKind::kLeaves, FaultKind::kStalls}) {
    const conformance::FaultCase fault{.strategy = "alltoall",
                                       .kind = kind,
                                       .step = conformance::FaultStep::kMidDispatch,
                                       .culprit = 1};
    const auto outcome = conformance::run_fault(group, fault, std::chrono::seconds(1));
    for (const std::string& finding : outcome.findings) report(fault.name(), finding);
  }
  const Dispatcher dispatcher(group, {.num_experts = 8, .top_k = 2, .width = 64}, "auto");
  if (group.rank() == 0) {
    std::printf("sockets: %zu checks of each strategy, %zu failures; auto chooses %s\n",
                checks.size(), num_failures, std::string(dispatcher.strategy().name()).c_str());
  }
  return num_failures;
}

int run_rank(size_t rank, std::vector<int> descriptors) {
  try {
    std::vector<size_t> processes(descriptors.size());
    std::iota(processes.begin(), processes.end(), size_t{0});
    const auto topology = Topology::uniform(static_cast<int>(processes.size()), 2);
    Group group(
        std::make_unique<SocketCommunicator>(std::make_shared<Sockets>(std::move(descriptors)),
                                             processes, static_cast<int>(rank), topology, "world"));
    return judge(group) == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("rank %zu: %s\n", rank, error.what());
    return 1;
  }
}

}  // namespace

int main() {
  constexpr size_t kSize = 4;
  std::vector<std::vector<int>> descriptors(kSize, std::vector<int>(kSize, -1));  // [P, P]
  for (size_t a = 0; a < kSize; ++a) {
    for (size_t b = 0; b < a; ++b) {
      int ends[2] = {};
      if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return 1;
      descriptors[a][b] = ends[0];
      descriptors[b][a] = ends[1];
    }
  }
  const auto close_all_but = [&](size_t own) {  // so that a socket closes with its process
    for (size_t rank = 0; rank < kSize; ++rank) {
      if (rank != own) std::for_each(descriptors[rank].begin(), descriptors[rank].end(), close);
    }
  };
  size_t num_started = 0;
  for (size_t rank = 0; rank < kSize; ++rank) {
    const pid_t child = fork();
    if (child > 0) ++num_started;
    if (child != 0) continue;
    close_all_but(rank);
    return run_rank(rank, std::move(descriptors[rank]));
  }
  close_all_but(kSize);
  bool all_right = num_started == kSize;
  int status = 0;
  while (wait(&status) > 0) all_right = all_right && status == 0;
  return all_right ? 0 : 1;
}
