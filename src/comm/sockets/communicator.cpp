#include "comm/sockets/communicator.hpp"

#include <utility>

#include "comm/exchange_arguments.hpp"
#include "comm/sockets/transfers.hpp"
#include "core/check.hpp"
#include "core/hash.hpp"

namespace crossdock {
namespace comm {
namespace {

constexpr std::chrono::milliseconds kInterruptInterval{50};  // the interface promises at most 100
                                                             // ms

// The ranks of a subgroup find the same number without a message.
uint64_t id_of_subgroup(uint64_t parent, std::span<const int> ranks, uint64_t number) {
  uint64_t hash = hash_bytes(std::as_bytes(std::span(&parent, 1)));
  hash = hash_bytes(std::as_bytes(ranks), hash);
  hash = hash_bytes(std::as_bytes(std::span(&number, 1)), hash);
  return hash == 0 ? 1 : hash;  // 0 is no communicator
}

const SocketsCommunicator& checked(const Communicator& communicator) {
  const auto* sockets = dynamic_cast<const SocketsCommunicator*>(&communicator);
  CROSSDOCK_CHECK(sockets != nullptr, "the communicator must be a sockets communicator, got ",
                  communicator.name());
  return *sockets;
}

}  // namespace

SocketsCommunicator::SocketsCommunicator(Members members, std::unique_ptr<Links> links,
                                         std::string note)
    : PolledCommunicator(links->rank(), std::move(members)),
      links_(std::move(links)),
      note_(std::move(note)) {
  if (links_->posts() != nullptr) posted_.emplace(*links_);
}

SocketsCommunicator::~SocketsCommunicator() {
  leave_quietly(kPlainLeave);
}

std::unique_ptr<Transfers> SocketsCommunicator::start(ExchangeArgs args, Traffic& /*traffic*/) {
  check_process();
  links_->begin_exchange();
  // Streams copy from and to the memory of the bytes while advance() runs, and never afterwards, so
  // args.memory need not be kept.
  return std::make_unique<SocketsTransfers>(args.peer_bytes, args.number, *links_);
}

bool SocketsCommunicator::has_quick_gather(std::span<const int64_t> recv_offsets) const {
  return posted_ && recv_offsets.back() > recv_offsets.front() &&
         PostedTransfers::fits(recv_offsets);
}

Transfers* SocketsCommunicator::start_gather(const GatherArgs& args) {
  check_process();
  links_->begin_exchange();
  posted_->begin({.exchange = args.number,
                  .send = {args.send.data, static_cast<size_t>(args.send.num_bytes)},
                  .recv = args.recv.data,
                  .recv_offsets = args.recv_offsets});
  return &*posted_;
}

void SocketsCommunicator::check_process() const {
  if (is_open()) return;
  throw Error(ErrorCode::kUnsupported,
              "this group belongs to the parent process; a forked child cannot use it");
}

void SocketsCommunicator::check_interrupt(const WaitContext& wait) {
  const auto& interrupt = endpoint().options().interrupt;
  if (!interrupt) return;
  const auto now = Clock::now();
  if (now - last_interrupt_check_ < kInterruptInterval) return;
  last_interrupt_check_ = now;
  if (!interrupt()) return;
  throw Error(ErrorCode::kCommunication,
              concat("interrupted in ", wait.operation, " (call ", wait.sequence, ")"),
              {.culprit = rank(), .sequence = wait.sequence, .operation = wait.operation});
}

std::unique_ptr<Communicator> SocketsCommunicator::subgroup(std::span<const int> ranks) {
  check_members(ranks, rank(), size());
  check_process();
  const Links::Args& parent = links_->args();
  const uint64_t number = num_subgroups_[{ranks.begin(), ranks.end()}]++;
  Members chosen = subset_of(members(), ranks);
  Links::Args args{.endpoint = parent.endpoint,
                   .comm_id = id_of_subgroup(parent.comm_id, ranks, number),
                   .world_ranks = {},
                   .rank = rank_among(ranks, rank()),
                   .topology = chosen.topology,
                   .directories = {},
                   .deadline = parent.deadline};
  for (const int member : ranks) {
    args.world_ranks.push_back(parent.world_ranks[static_cast<size_t>(member)]);
    args.directories.push_back(parent.directories[static_cast<size_t>(member)]);
  }
  return std::make_unique<SocketsCommunicator>(std::move(chosen),
                                               std::make_unique<Links>(std::move(args)), note_);
}

}  // namespace comm

SocketsCounters sockets_counters(const Communicator& communicator) {
  return comm::checked(communicator).endpoint().counters();
}

std::string sockets_note(const Communicator& communicator) {
  return comm::checked(communicator).note();
}

}  // namespace crossdock
