#include "dispatch/cuda/rank_agreement.hpp"

#include <algorithm>

#include "comm/agreement/items.hpp"
#include "comm/agreement/rendezvous.hpp"
#include "comm/attachment.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "dispatch/cuda/fault_error.hpp"

namespace crossdock::cuda {
namespace {

// Calls without a meeting of the hosts are numbered from the last meeting on.
constexpr uint64_t kCallsPerMeeting = 1'000'000;

// Precedes a rank's handles and news in its proposal.
struct ProposalHeader {
  int64_t num_handles;
  int64_t num_news;  // about its arena
  int64_t needs_barrier;
  int64_t has_waiting_room;
  int64_t num_slots;
};

}  // namespace

RankAgreement::RankAgreement(const Parts& parts)
    : parts_(parts),
      may_run_ahead_(parts.may_run_ahead && parts.context.options.run_ahead &&
                     parts.context.config->max_rows && !is_alone() &&
                     (!group().communicator().shares_address_space() ||
                      comm::gpu_pretences_of(group()).threads_run_ahead)) {
  if (!may_run_ahead_) return;
  recovery_ = Recovery::of(group());
  recovery_->add(*this);
}

RankAgreement::~RankAgreement() {
  if (recovery_) recovery_->remove(*this);
}

bool RankAgreement::runs_ahead(const RankStreams::Lane& lane) const {
  return may_run_ahead_ && lane.is_connected && parts_.peers.grows_alone() &&
         !is_capturing(parts_.streams.stream_of(lane));
}

AgreedCall RankAgreement::agree(CallProposal proposal, int max_sms) {
  if (!proposal.must_meet && runs_ahead(proposal.lane)) {
    return agree_ahead(std::move(proposal), max_sms);
  }
  if (is_alone() && proposal.lane.is_connected && proposal.refusal == nullptr) {
    return agree_alone(std::move(proposal), max_sms);
  }
  return meet_hosts(std::move(proposal), max_sms);
}

AgreedCall RankAgreement::agree_alone(CallProposal proposal, int max_sms) {
  AgreedCall agreed;
  agreed.operation = proposal.operation;
  agreed.sequence = last_meeting_ * kCallsPerMeeting + ++num_calls_;
  agreed.num_slots = proposal.num_slots;
  agreed.has_waiting_room = has_waiting_room(proposal.lane, max_sms);
  agreed.handles.push_back(std::move(proposal.handles));
  parts_.streams.note_work(proposal.lane);
  return agreed;
}

AgreedCall RankAgreement::agree_ahead(CallProposal proposal, int max_sms) {
  if (proposal.refusal != nullptr) {
    group().check();  // a failure is not a refusal
    const CallText call{proposal.operation, proposal.subject, std::move(proposal.call_text)};
    std::optional<RefusedCall> own;
    if (!is_halted()) own = {.account = {call, *proposal.refusal}, .lane = &proposal.lane};
    recovery_->recover(*this, own);
  }
  CROSSDOCK_ASSERT(std::ssize(proposal.handles) <= kMostShown);
  AgreedCall agreed;
  agreed.operation = proposal.operation;
  agreed.sequence = last_meeting_ * kCallsPerMeeting + ++num_calls_;
  agreed.needs_barrier = true;
  agreed.has_waiting_room = has_waiting_room(proposal.lane, max_sms);
  agreed.queued.number = log_.add(proposal.operation, proposal.subject, proposal.call_text);
  agreed.queued.hash = hash_of_call(proposal.operation, proposal.subject, proposal.call_text);
  for (const MemoryHandle& handle : proposal.handles) {
    agreed.queued.offsets[agreed.queued.num_shown++] =
        handle.device < 0 ? QueuedCall::kNoMemory : handle.offset;
  }
  agreed.handles.push_back(std::move(proposal.handles));
  parts_.streams.note_work(proposal.lane);
  return agreed;
}

AgreedCall RankAgreement::meet_hosts(CallProposal proposal, int max_sms) {
  RankStreams::Lane& lane = proposal.lane;
  PeerMemory& peers = parts_.peers;
  std::vector<ChunkNotice> news;
  const std::optional<Error> refusal = refusal_of([&] {
    if (proposal.refusal != nullptr) throw Error(*proposal.refusal);
    if (!lane.is_connected) {
      const Buffer& mailbox = lane.channel->mailbox();
      const MemoryBlock block{.base = mailbox.data(), .num_bytes = mailbox.num_bytes()};
      proposal.handles.push_back(peers.show(mailbox.data(), block));
    }
    news = peers.news();
  });
  const ProposalHeader own{.num_handles = std::ssize(proposal.handles),
                           .num_news = std::ssize(news),
                           .needs_barrier = proposal.needs_barrier,
                           .has_waiting_room = has_waiting_room(proposal.lane, max_sms),
                           .num_slots = proposal.num_slots};
  std::vector<std::byte> body;
  append_item(body, own);
  append_items(body, proposal.handles);
  append_items(body, news);
  Agreement agreement;
  try {
    agreement = group().agree({.operation = proposal.operation,
                               .subject = proposal.subject,
                               .config = std::move(proposal.call_text),
                               .body = body,
                               .refusal = as_refusal(refusal)});
  } catch (const Error& error) {
    if (group().is_poisoned() || is_capturing(parts_.streams.stream_of(lane))) throw;
    const bool peers_are_halted = comm::is_stop(error);
    if (recovery_ && (peers_are_halted || is_halted())) {
      recovery_->recover(*this, std::nullopt);
    }
    clear_reported_faults(lane);
    throw;
  }
  last_meeting_ = agreement.sequence;
  num_calls_ = 0;
  peers.note_heard(news);
  AgreedCall agreed;
  agreed.operation = proposal.operation;
  agreed.sequence = agreement.sequence;
  agreed.has_waiting_room = true;
  for (int p = 0; p < group().size(); ++p) {
    std::span<const std::byte> bytes = agreement.body(p);
    const auto header = split_item<ProposalHeader>(bytes);
    agreed.needs_barrier = agreed.needs_barrier || header.needs_barrier != 0;
    agreed.has_waiting_room = agreed.has_waiting_room && header.has_waiting_room != 0;
    agreed.num_slots = std::max(agreed.num_slots, header.num_slots);
    agreed.handles.push_back(split_items<MemoryHandle>(bytes, header.num_handles));
    const auto of_peer = split_items<ChunkNotice>(bytes, header.num_news);
    if (!of_peer.empty()) run_agreed(group(), [&] { peers.hear(p, of_peer); });
  }
  if (!lane.is_connected) connect(proposal, agreed);
  parts_.streams.note_work(proposal.lane);
  return agreed;
}

// A rank that cannot reach a peer refuses before any rank launches a kernel that waits for it.
void RankAgreement::connect(const CallProposal& proposal, const AgreedCall& agreed) {
  RankStreams::Lane& lane = proposal.lane;
  const std::optional<Error> refusal = refusal_of([&] {
    num_sharing_ = 1;
    std::vector<std::byte*> mailboxes;
    std::vector<int> devices;
    for (int p = 0; p < group().size(); ++p) {
      const MemoryHandle& handle = agreed.handles[static_cast<size_t>(p)].back();
      const int slot = parts_.channel_ranks.slot_of(p);
      if (slot >= 0) {
        mailboxes.push_back(parts_.peers.reach(p, handle));
        devices.push_back(handle.device);
      }
      const bool shares_gpu = handle.device == parts_.device && handle.is_shared == 0;
      if (p != group().rank() && shares_gpu) ++num_sharing_;
      if (may_run_ahead_ && parts_.peers.grows_alone()) bases_.base[p] = parts_.peers.base_of(p);
    }
    lane.channel->connect(mailboxes);
    parts_.peers.set_peer_devices(std::move(devices));
    lost_peers_.add(lane.channel);
    lost_peers_.set_watch(parts_.peers.watch_owners(
        [this](int peer) { lost_peers_.note(parts_.channel_ranks.slot_of(peer)); }));
  });
  group().agree({.operation = proposal.operation,
                 .subject = proposal.subject,
                 .under_way = true,
                 .refusal = as_refusal(refusal)});
  lane.is_connected = true;
}

bool RankAgreement::has_waiting_room(const RankStreams::Lane& lane, int max_sms) {
  if (max_sms <= 0) return false;
  const uint64_t stream_id = id_of(parts_.streams.stream_of(lane));
  std::shared_ptr<const void>& room = waiting_rooms_[{stream_id, max_sms}];
  if (!room) {
    room = WaitingRoom::of(parts_.device)
               .take({.stream_id = stream_id, .sms = max_sms, .num_streams = num_sharing_});
  }
  return room != nullptr;
}

std::vector<std::shared_ptr<const void>> RankAgreement::reservations() const {
  std::vector<std::shared_ptr<const void>> rooms;
  for (const auto& [request, room] : waiting_rooms_) rooms.push_back(room);
  return rooms;
}

std::vector<std::shared_ptr<const void>> RankAgreement::late_mailboxes() const {
  std::vector<std::shared_ptr<const void>> mailboxes;
  if (!recovery_) return mailboxes;
  for (const RankStreams::Lane* lane : connected_lanes()) {
    mailboxes.push_back(lane->channel->mailbox().owner());
  }
  return mailboxes;
}

void RankAgreement::await_peers(const RankStreams::Lane& lane, const AgreedCall& agreed,
                                Operation operation) const {
  const PeerSignals& signals = lane.channel->signals();
  const cudaStream_t stream = parts_.streams.stream_of(lane);
  if (agreed.is_queued()) {
    launch_exchange(signals, agreed.queued, operation, bases_, stream);
  } else {
    launch_barrier(signals, operation, stream);
  }
}

std::vector<RankStreams::Lane*> RankAgreement::connected_lanes() const {
  std::vector<RankStreams::Lane*> lanes = parts_.streams.lanes();
  std::erase_if(lanes, [](const RankStreams::Lane* lane) { return !lane->is_connected; });
  return lanes;
}

void RankAgreement::raise_faults() {
  for (const bool fatal : {true, false}) {
    for (const RankStreams::Lane* lane : parts_.streams.lanes()) {
      const std::optional<Fault> fault = lane->channel->fault();
      if (fault && is_fatal(*fault) == fatal) raise(*lane, *fault);
    }
  }
  if (const std::optional<Error> error = parts_.streams.watch()->fault()) {
    group().fail(*error);
    group().check();
  }
}

Error RankAgreement::error_of(const RankStreams::Lane& lane, Fault fault) const {
  fault.culprit = parts_.channel_ranks.rank_at(fault.culprit);
  const DispatchConfig& config = *parts_.context.config;
  return to_error(fault, {.rank = group().rank(),
                          .P = group().size(),
                          .num_experts = config.num_experts,
                          .max_rows = config.max_rows.value_or(0),
                          .deadline_ns = lane.channel->signals().deadline_ns,
                          .shares_gpu = num_sharing_ > 1});
}

void RankAgreement::raise(const RankStreams::Lane& lane, Fault fault) {
  const Error error = error_of(lane, fault);
  if (is_fatal(fault)) {
    group().fail(error);
  } else if (!lane.channel->halt()) {
    lane.channel->clear_fault();
  }
  throw error;
}

bool RankAgreement::is_halted() const {
  return std::ranges::any_of(parts_.streams.lanes(), [](const RankStreams::Lane* lane) {
    return lane->channel->halt().has_value();
  });
}

void RankAgreement::check() {
  group().check();
  if (recovery_ && is_halted() && !is_capturing(parts_.streams.callers_stream())) {
    recovery_->recover(*this, std::nullopt);
  }
  raise_faults();
}

uint32_t RankAgreement::note_refused(const CallText& call) {
  return log_.add(call.operation, call.subject, call.config);
}

void RankAgreement::stop(const RankStreams::Lane* refusing, uint32_t number, Operation operation) {
  const CallGuard guard(parts_.device);
  for (const RankStreams::Lane* lane : connected_lanes()) {
    const cudaStream_t stream = parts_.streams.stream_of(*lane);
    if (is_capturing(stream)) continue;
    const QueuedCall call{.number = number,
                          .hash = lane == refusing ? QueuedCall::kRefuses : QueuedCall::kStops,
                          .num_shown = 0};
    launch_exchange(lane->channel->signals(), call, operation, bases_, stream);
  }
}

void RankAgreement::await_stop() {
  const CallGuard guard(parts_.device);
  for (const RankStreams::Lane* lane : connected_lanes()) {
    if (is_capturing(parts_.streams.stream_of(*lane))) continue;
    parts_.streams.await(*lane);
    const std::optional<Fault> fault = lane->channel->fault();
    if (fault && is_fatal(*fault)) raise(*lane, *fault);
  }
}

std::optional<CallAccount> RankAgreement::account(const std::optional<CallAccount>& own,
                                                  uint32_t own_number) const {
  for (const RankStreams::Lane* lane : connected_lanes()) {
    const std::optional<Fault> fault = lane->channel->halt();
    if (!fault) continue;
    const auto code = static_cast<FaultCode>(fault->code);
    const bool has_number = code == FaultCode::kOtherCall || code == FaultCode::kStopped;
    CallAccount found;
    if (!has_number) {
      found.call.operation = "plan";
      found.refusal = error_of(*lane, *fault);
      return found;
    }
    const auto number = static_cast<uint32_t>(fault->route);
    if (own && number == own_number) return own;
    if (code == FaultCode::kStopped) continue;  // the rank that stopped knows why
    const CallText* call = log_.find(number);
    if (call == nullptr) continue;
    found.call = *call;
    return found;
  }
  return std::nullopt;
}

void RankAgreement::resume(uint64_t sequence) {
  const CallGuard guard(parts_.device);
  for (const RankStreams::Lane* lane : connected_lanes()) {
    const cudaStream_t stream = parts_.streams.stream_of(*lane);
    if (is_capturing(stream)) continue;
    launch_resume(lane->channel->signals(), stream);
    lane->channel->clear_halt();
  }
  last_meeting_ = sequence;
  num_calls_ = 0;
}

// After a meeting that failed on all ranks. A routing that the devices refused is refused on all
// ranks and has now been reported. Clear it, or a rank whose device was behind would report it
// again.
void RankAgreement::clear_reported_faults(const RankStreams::Lane& lane) {
  parts_.streams.watch()->try_await(
      parts_.streams.stream_of(lane));  // the next call reports a timeout
  for (const RankStreams::Lane* one : parts_.streams.lanes()) {
    const std::optional<Fault> fault = one->channel->fault();
    if (fault && !is_fatal(*fault)) one->channel->clear_fault();
  }
}

void RankAgreement::say_farewell() noexcept {
  if (!may_run_ahead_) return;
  const uint32_t hash = group().is_poisoned() ? QueuedCall::kFailed : QueuedCall::kStops;
  refusal_of([&] {
    for (const RankStreams::Lane* lane : connected_lanes()) {
      const cudaStream_t stream = parts_.streams.stream_of(*lane);
      if (!is_capturing(stream)) launch_farewell(lane->channel->signals(), hash, stream);
    }
  });
}

}  // namespace crossdock::cuda
