#include "comm/sockets/links.hpp"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "comm/memory/bell.hpp"
#include "comm/sockets/endpoint.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"

namespace crossdock::comm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Longer than it takes to wake all ranks of a node: otherwise, after sleeping once because one rank
// was late, ranks would sleep in every exchange from then on.
constexpr microseconds kSpinTime{200};
constexpr milliseconds kYieldTime{1};
constexpr const char* kSetUp = "set-up";  // the operation in errors of the constructor
constexpr milliseconds kNearSleep{20};    // unless woken earlier; then checks for dead processes

/// Cores that at least one of these processes may use.
int num_cores(std::span<const pid_t> processes) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const pid_t process : processes) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(process, sizeof cores, &cores) == 0) CPU_OR(&all, &all, &cores);
  }
  return CPU_COUNT(&all);
}

}  // namespace

Links::Links(Args args)
    : args_(std::move(args)),
      member_of_rank_(args_.world_ranks.size(), -1),
      rank_of_world_(args_.endpoint->world().blobs.size(), -1) {
  const auto& node = args_.topology.node_of_rank;
  std::vector<int> near;
  for (int peer = 0; peer < size(); ++peer) {
    const auto p = static_cast<size_t>(peer);
    rank_of_world_[static_cast<size_t>(args_.world_ranks[p])] = peer;
    if (node[p] != node[static_cast<size_t>(args_.rank)]) {
      has_far_ = true;
      continue;
    }
    member_of_rank_[p] = static_cast<int>(near.size());
    near.push_back(peer);
  }
  endpoint().open_communicator(args_.comm_id);
  if (near.size() < 2) return;
  try {
    share_memory(near);
  } catch (const MemberIsMissing& found) {
    give_up(found.failure);
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known != nullptr && known->context().culprit >= 0) {  // all ranks have it already
      endpoint().close_communicator(args_.comm_id);
      throw;
    }
    give_up({.code = known != nullptr ? known->code() : ErrorCode::kPeerFailed,
             .culprit = rank(),
             .reporter = rank(),
             .sequence = 0,
             .operation = kSetUp,
             .text = error.what()});
  }
}

void Links::give_up(const Failure& failure) const {
  endpoint().close_communicator(args_.comm_id);
  announce(failure);
  throw to_error(failure, rank(), size());
}

Links::~Links() {
  if (!endpoint().is_in_creator()) {  // a forked child must not touch the shared memory
    (void)memory_.release();
    return;
  }
  memory_.reset();
  endpoint().close_communicator(args_.comm_id);
}

void Links::share_memory(const std::vector<int>& near) {
  CROSSDOCK_CHECK(near.size() <= NodeFileHead::kMaxMembers, "a node may have at most ",
                  NodeFileHead::kMaxMembers, " ranks, got ", near.size());
  NodeMemory::Args memory{.comm_id = args_.comm_id,
                          .self = member_of_rank_[static_cast<size_t>(args_.rank)],
                          .blobs = {},
                          .directories = {},
                          .while_waiting = {}};
  std::vector<pid_t> processes;
  for (const int peer : near) {
    memory.blobs.push_back(&endpoint().world().blobs[static_cast<size_t>(world_rank(peer))]);
    memory.directories.push_back(args_.directories[static_cast<size_t>(peer)].get());
    processes.push_back(memory.blobs.back()->process.pid);
  }
  const SocketsOptions& options = endpoint().options();
  OnceNotice notice(&options.on_wait, options.notice_after);
  memory.while_waiting = [&, begin = Clock::now()](int missing) {
    const int peer = near[static_cast<size_t>(missing)];
    check_arrival(peer, begin);
    const auto waited = Clock::now() - begin;
    if (!notice.is_due(waited)) return;
    notice.say({.rank = rank(),
                .size = size(),
                .awaited = {peer},
                .operation = kSetUp,
                .waited = waited,
                .left = args_.deadline - waited});
  };
  may_spin_ = std::ssize(near) <= num_cores(processes);
  memory_ = std::make_unique<NodeMemory>(memory, endpoint().directory());
  near_ = std::make_unique<NodeStreams>(*memory_);
  if (!has_far_) posts_ = std::make_unique<Posts>(*memory_);
}

// Throws if a rank of the node cannot do its part, or is late. Refusals come first: a rank that is
// gone may have said why. Does not announce a missing rank: it may have arrived and left since the
// last check (NodeMemory::open_members).
void Links::check_arrival(int peer, Clock::time_point begin) const {
  const auto failure = failure_to_arrive(peer, begin);
  if (const auto known = refusal()) throw to_error(failure_from(*known), rank(), size());
  if (failure) throw MemberIsMissing(*failure);
  if (const auto& interrupt = endpoint().options().interrupt; interrupt && interrupt()) {
    throw Error(ErrorCode::kCommunication,
                concat("interrupted while waiting for rank ", peer, " to make the communicator"));
  }
}

std::optional<Failure> Links::failure_to_arrive(int peer, Clock::time_point begin) const {
  const WaitContext wait{.operation = kSetUp, .sequence = 0, .arrival = {}, .progress = {}};
  const SocketsBlob& blob = endpoint().world().blobs[static_cast<size_t>(world_rank(peer))];
  if (has_ended(blob.process)) {
    return left_failure(peer, concat("its process, pid ", blob.process.pid, ", has ended"), wait);
  }
  if (args_.directories[static_cast<size_t>(peer)]->is_closed()) {
    return left_failure(peer, "it gave up", wait);
  }
  if (Clock::now() < deadline_after(begin, args_.deadline)) return std::nullopt;
  return late_failure({.culprit = peer, .reporter = rank(), .waited = args_.deadline}, wait);
}

std::optional<ControlMessage> Links::refusal() const {
  for (const auto& directory : args_.directories) {
    const auto found = directory ? directory->refusal_of(args_.comm_id) : std::nullopt;
    if (found && is_valid(*found, size())) return found;
  }
  return std::nullopt;
}

// Tells the other ranks that this one has failed to make its part of the communicator.
void Links::announce(const Failure& failure) const {
  const ControlMessage message = abort_message(failure);
  endpoint().directory().refuse(args_.comm_id, message);
  if (!has_far_) return;
  for (int peer = 0; peer < size(); ++peer) {
    if (!is_near(peer)) endpoint().send_control(args_.comm_id, world_rank(peer), message);
  }
  flush_in_background(args_.endpoint);
}

void Links::begin_exchange() {
  awaited_ = NodeFileHead::kForAnything;
  if (memory_) memory_->stay_awake();
}

void Links::await_post_of(int peer) {
  awaited_ =
      NodeFileHead::kForPostOf + static_cast<uint32_t>(member_of_rank_[static_cast<size_t>(peer)]);
}

void Links::expect(int peer) {
  if (!is_near(peer)) endpoint().connect(world_rank(peer));
}

size_t Links::write(int peer, std::span<const std::byte> bytes) {
  const int member = member_of_rank_[static_cast<size_t>(peer)];
  return member >= 0 ? near_->write(member, bytes)
                     : endpoint().write(args_.comm_id, world_rank(peer), bytes);
}

size_t Links::read(int peer, std::span<std::byte> bytes) {
  const int member = member_of_rank_[static_cast<size_t>(peer)];
  return member >= 0 ? near_->read(member, bytes)
                     : endpoint().read(args_.comm_id, world_rank(peer), bytes);
}

bool Links::peek(int peer, std::span<std::byte> bytes) const {
  return near_->peek(member_of_rank_[static_cast<size_t>(peer)], bytes);
}

bool Links::is_flushed(int peer) const {
  return is_near(peer) || endpoint().is_flushed(world_rank(peer));
}

void Links::poll() const {
  if (has_far_) endpoint().poll();
}

std::optional<std::string> Links::end_of(int peer) const {
  if (is_near(peer)) return std::nullopt;  // found by the process watch
  auto reason = endpoint().end_of(world_rank(peer));
  if (reason && endpoint().has_unread(args_.comm_id, world_rank(peer))) return std::nullopt;
  return reason;
}

void Links::pause(std::chrono::nanoseconds idle) {
  if (has_far_) {
    if (idle < kYieldTime) {
      sched_yield();
    } else {
      endpoint().wait_for_sockets(
          std::clamp<std::chrono::nanoseconds>(idle / 16, microseconds(50), microseconds(1000)));
    }
    return;
  }
  if (!memory_) return;
  if (may_spin_ && idle < kSpinTime) {
    memory_->stay_awake();
    spin_once();
  } else if (!memory_->is_prepared(awaited_)) {
    memory_->prepare_to_sleep(awaited_);  // then look once more
  } else {
    memory_->sleep(kNearSleep);
  }
}

void Links::send_to(int peer, const ControlMessage& message) const {
  const int member = member_of_rank_[static_cast<size_t>(peer)];
  if (member >= 0) {
    near_->send_control(member, message);
  } else {
    endpoint().send_control(args_.comm_id, world_rank(peer), message);
  }
}

void Links::send(int peer, const ControlMessage& message) {
  send_to(peer, message);
}

void Links::send_to_all_others(const ControlMessage& message) {
  tell_all_others(message);
  if (has_far_ && endpoint().is_in_creator()) flush_in_background(args_.endpoint);
}

void Links::say_goodbye(const ControlMessage& message) const {
  if (args_.says_goodbye) tell_all_others(message);
}

void Links::tell_all_others(const ControlMessage& message) const {
  if (!endpoint().is_in_creator()) return;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) send_to(peer, message);
  }
  poll();  // a connection that was just opened may be ready by now
}

void Links::poll(const std::function<void(int sender, const ControlMessage&)>& handle) {
  const auto take = [&](int sender, const ControlMessage& message) {
    if (is_valid(message, size())) handle(sender, message);
  };
  const bool has_near = near_ && near_->has_new_control();
  for (int peer = 0; has_near && peer < size(); ++peer) {
    if (peer == rank() || !is_near(peer)) continue;
    while (const auto message = near_->take_control(member_of_rank_[static_cast<size_t>(peer)])) {
      take(peer, *message);
    }
  }
  if (!has_far_) return;
  endpoint().poll();
  while (const auto message = endpoint().take_control(args_.comm_id)) {
    const int sender = rank_of_world_[static_cast<size_t>(message->first)];
    if (sender >= 0) take(sender, message->second);
  }
}

}  // namespace crossdock::comm
