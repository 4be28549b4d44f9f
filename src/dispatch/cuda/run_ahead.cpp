#include "dispatch/cuda/run_ahead.hpp"

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "comm/agreement/items.hpp"
#include "comm/agreement/rendezvous.hpp"
#include "comm/attachment.hpp"
#include "comm/cuda/peer_channel.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "core/hash.hpp"
#include "dispatch/cuda/fault_error.hpp"

namespace crossdock::cuda {
namespace {

using comm::RendezvousHeader;

// Calls without a meeting of the hosts are numbered from the last meeting on.
constexpr uint64_t kCallsPerMeeting = 1'000'000;

// The accounts of all ranks.
struct Accounts {
  std::vector<RendezvousHeader> headers;  // [P]; a rank without an account repeats another's
  std::vector<std::string> configs;       // [P]
  std::vector<std::string> refusals;      // [P]
};

std::vector<std::byte> pack(const std::optional<CallAccount>& account) {
  std::vector<std::byte> bytes;
  if (!account) return bytes;
  const std::string refusal = account->refusal ? account->refusal->what() : "";
  append_item(bytes, comm::make_header({.operation = account->call.operation,
                                        .subject = account->call.subject,
                                        .config = account->call.config,
                                        .refusal = as_refusal(account->refusal)},
                                       /*sequence=*/0));
  append_items(bytes, std::vector(account->call.config.begin(), account->call.config.end()));
  append_items(bytes, std::vector(refusal.begin(), refusal.end()));
  return bytes;
}

std::string split_text(std::span<const std::byte>& bytes, int64_t size) {
  const std::vector<char> text = split_items<char>(bytes, size);
  return {text.begin(), text.end()};
}

std::optional<Accounts> unpack(const Agreement& agreement, int num_ranks) {
  Accounts all;
  std::optional<size_t> first;  // first rank with an account
  std::vector<bool> has_account;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::span<const std::byte> bytes = agreement.body(rank);
    has_account.push_back(!bytes.empty());
    all.headers.emplace_back();
    all.configs.emplace_back();
    all.refusals.emplace_back();
    if (bytes.empty()) continue;
    if (!first) first = static_cast<size_t>(rank);
    RendezvousHeader& header = all.headers.back();
    header = split_item<RendezvousHeader>(bytes);
    header.sequence = agreement.sequence;
    all.configs.back() = split_text(bytes, header.config_bytes);
    all.refusals.back() = split_text(bytes, header.refuses() ? header.body_bytes : 0);
  }
  if (!first) return std::nullopt;
  for (size_t r = 0; r < has_account.size(); ++r) {
    if (has_account[r]) continue;
    all.headers[r] = all.headers[*first];
    all.headers[r].refusal = 0;
    all.configs[r] = all.configs[*first];
  }
  return all;
}

}  // namespace

uint32_t CallLog::add(const CallText& call) {
  const uint32_t number = ++last_;
  const size_t place = (number - 1) % kMostCalls;
  if (place == calls_.size()) calls_.emplace_back();
  calls_[place] = call;
  return number;
}

const CallText* CallLog::find(uint32_t number) const {
  const bool is_kept = number >= 1 && number <= last_ && last_ - number < kMostCalls;
  return is_kept ? &calls_[(number - 1) % kMostCalls] : nullptr;
}

uint32_t hash_of_call(const CallText& call) {
  uint64_t hash = hash_bytes(std::string_view(call.operation));
  hash = hash_bytes(body_of(call.subject), hash);
  hash = hash_bytes(call.config, hash);
  const uint64_t mixed = hash ^ hash >> 32;
  constexpr uint64_t kNumHashes = QueuedCall::kFailed - QueuedCall::kFirstHash;
  return QueuedCall::kFirstHash + static_cast<uint32_t>(mixed % kNumHashes);
}

Error explain_halt(Group& group, const std::optional<CallAccount>& own) {
  const std::vector<std::byte> body = pack(own);
  const Agreement agreement = group.agree({.operation = "explain", .body = body});
  const std::optional<Accounts> all = unpack(agreement, group.size());
  const ErrorContext context{
      .culprit = -1, .sequence = agreement.sequence, .operation = own ? own->call.operation : ""};
  if (!all) {
    return {ErrorCode::kInternal, "the ranks' GPUs were halted and no rank knows why", context};
  }
  const auto refusal_of = [&](int rank) { return all->refusals[static_cast<size_t>(rank)]; };
  const auto config_of = [&](int rank) { return all->configs[static_cast<size_t>(rank)]; };
  const auto configs_of = [&](const comm::Disagreement& odd) {
    return std::pair(config_of(odd.culprit), config_of(odd.reference));
  };
  if (auto error = comm::find_disagreement(all->headers, refusal_of, configs_of, context)) {
    return *std::move(error);
  }
  return {ErrorCode::kInternal, "the ranks' GPUs were halted although their calls agree", context};
}

RunAhead::RunAhead(const Parts& parts) : parts_(parts) {
  const PathContext& context = parts.context;
  const bool is_enabled = parts.is_allowed && context.options.run_ahead &&
                          context.config->max_rows && group().size() > 1 &&
                          (!group().communicator().shares_address_space() ||
                           comm::gpu_pretences_of(group()).threads_run_ahead);
  if (!is_enabled) return;
  siblings_ = siblings_in(group());
  siblings_->push_back(this);
}

RunAhead::~RunAhead() {
  if (siblings_) std::erase(*siblings_, this);
}

uint64_t RunAhead::next_sequence() {
  return last_meeting_ * kCallsPerMeeting + ++num_calls_;
}

void RunAhead::note_meeting(uint64_t sequence) {
  last_meeting_ = sequence;
  num_calls_ = 0;
}

QueuedCall RunAhead::queue(const CallText& call, const std::vector<MemoryHandle>& shown) {
  CROSSDOCK_ASSERT(std::ssize(shown) <= kMostShown);
  QueuedCall queued;
  queued.number = log_.add(call);
  queued.hash = hash_of_call(call);
  for (const MemoryHandle& handle : shown) {
    queued.offsets[queued.num_shown++] = handle.device < 0 ? QueuedCall::kNoMemory : handle.offset;
  }
  return queued;
}

void RunAhead::refuse(const RankStreams::Lane& lane, CallText call, const Error& refusal) {
  group().check();  // a failure is not a refusal
  if (is_halted()) recover();
  recover(&lane, CallAccount{std::move(call), refusal});
}

void RunAhead::explain(const RankStreams::Lane& lane, const Error& error) {
  // Also if only other dispatchers of the group run ahead: the hosts of the other ranks wait until
  // this one comes to the same place.
  if (find_siblings(group()) && (comm::is_stop(error) || is_halted())) recover();
  clear_reported_faults(lane);
}

std::vector<std::shared_ptr<const void>> RunAhead::late_mailboxes() const {
  std::vector<std::shared_ptr<const void>> mailboxes;
  if (!is_enabled()) return mailboxes;
  for (const RankStreams::Lane* lane : connected_lanes()) {
    mailboxes.push_back(lane->channel->mailbox().owner());
  }
  return mailboxes;
}

std::vector<RankStreams::Lane*> RunAhead::connected_lanes() const {
  std::vector<RankStreams::Lane*> lanes = parts_.streams.lanes();
  std::erase_if(lanes, [](const RankStreams::Lane* lane) { return !lane->is_connected; });
  return lanes;
}

void RunAhead::raise_faults() {
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

Error RunAhead::error_of(const RankStreams::Lane& lane, Fault fault) const {
  fault.culprit = parts_.channel_ranks.rank_at(fault.culprit);
  const DispatchConfig& config = *parts_.context.config;
  return to_error(fault, {.rank = group().rank(),
                          .P = group().size(),
                          .num_experts = config.num_experts,
                          .max_rows = config.max_rows.value_or(0),
                          .deadline_ns = lane.channel->signals().deadline_ns,
                          .shares_gpu = num_sharing_ > 1});
}

void RunAhead::raise(const RankStreams::Lane& lane, Fault fault) {
  const Error error = error_of(lane, fault);
  if (is_fatal(fault)) {
    group().fail(error);
  } else if (!lane.channel->halt()) {
    lane.channel->clear_fault();
  }
  throw error;
}

bool RunAhead::is_halted() const {
  return std::ranges::any_of(parts_.streams.lanes(), [](const RankStreams::Lane* lane) {
    return lane->channel->halt().has_value();
  });
}

void RunAhead::check() {
  group().check();
  if (is_enabled() && is_halted() && !is_capturing(parts_.streams.callers_stream())) recover();
  raise_faults();
}

void RunAhead::stop(const RankStreams::Lane* refusing, uint32_t number, Operation operation) {
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

void RunAhead::await_stop() {
  const CallGuard guard(parts_.device);
  for (const RankStreams::Lane* lane : connected_lanes()) {
    if (is_capturing(parts_.streams.stream_of(*lane))) continue;
    parts_.streams.await(*lane);
    const std::optional<Fault> fault = lane->channel->fault();
    if (fault && is_fatal(*fault)) raise(*lane, *fault);
  }
}

std::optional<CallAccount> RunAhead::account(const std::optional<CallAccount>& own,
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

void RunAhead::resume(uint64_t sequence) {
  const CallGuard guard(parts_.device);
  for (const RankStreams::Lane* lane : connected_lanes()) {
    const cudaStream_t stream = parts_.streams.stream_of(*lane);
    if (is_capturing(stream)) continue;
    launch_resume(lane->channel->signals(), stream);
    lane->channel->clear_halt();
  }
  note_meeting(sequence);
}

// After a meeting that failed on all ranks. A routing that the devices refused is refused on all
// ranks and has now been reported. Clear it, or a rank whose device was behind would report it
// again.
void RunAhead::clear_reported_faults(const RankStreams::Lane& lane) {
  parts_.streams.watch()->try_await(
      parts_.streams.stream_of(lane));  // the next call reports a timeout
  for (const RankStreams::Lane* one : parts_.streams.lanes()) {
    const std::optional<Fault> fault = one->channel->fault();
    if (fault && !is_fatal(*fault)) one->channel->clear_fault();
  }
}

void RunAhead::say_farewell() noexcept {
  if (!is_enabled()) return;
  const uint32_t hash = group().is_poisoned() ? QueuedCall::kFailed : QueuedCall::kStops;
  refusal_of([&] {
    for (const RankStreams::Lane* lane : connected_lanes()) {
      const cudaStream_t stream = parts_.streams.stream_of(*lane);
      if (!is_capturing(stream)) launch_farewell(lane->channel->signals(), hash, stream);
    }
  });
}

std::shared_ptr<RunAhead::Siblings> RunAhead::siblings_in(Group& group) {
  std::shared_ptr<Siblings> shared = find_siblings(group);
  if (!shared) {
    shared = std::make_shared<Siblings>();
    comm::attachment_of(group) = shared;
  }
  return shared;
}

std::shared_ptr<RunAhead::Siblings> RunAhead::find_siblings(Group& group) {
  return std::static_pointer_cast<Siblings>(comm::attachment_of(group).lock());
}

namespace {

// Ranks that are meeting in another call get an error there, and come here when they find out why.
void meet_to_stop(Group& group) {
  while (true) {
    try {
      group.agree({.operation = comm::kStopOperation});
      return;
    } catch (const Error&) {
      if (group.is_poisoned()) throw;
    }
  }
}

}  // namespace

// Each rank stops queueing and tells its peers' kernels so. Once all hosts have met, no kernel
// waits for anything that is still to come, and the streams of all ranks drain. The hosts then
// compare what their devices have found, and resume. Memory that the calls use is not reused before
// the devices of all ranks have finished with it.
void RunAhead::recover(const RankStreams::Lane* refusing,
                       const std::optional<CallAccount>& refused) {
  const std::shared_ptr<Siblings> siblings = find_siblings(group());
  uint32_t number = 0;
  Operation operation = Operation::kPlan;
  if (refused) {
    number = log_.add(refused->call);
    operation = operation_of(refused->call.operation);
  }
  for (RunAhead* one : *siblings) {
    const bool is_this = one == this;
    one->stop(is_this ? refusing : nullptr, is_this ? number : 0, operation);
  }
  meet_to_stop(group());
  for (RunAhead* one : *siblings) one->await_stop();
  std::optional<CallAccount> account;
  for (const RunAhead* one : *siblings) {
    if (!account) account = one->account(one == this ? refused : std::nullopt, number);
  }
  const Error error = explain_halt(group(), account);
  for (RunAhead* one : *siblings) one->resume(error.context().sequence);
  throw error;
}

}  // namespace crossdock::cuda
