#include "dispatch/cuda/run_ahead.hpp"

#include <span>
#include <utility>

#include "comm/agreement/items.hpp"
#include "comm/agreement/rendezvous.hpp"
#include "comm/attachment.hpp"
#include "comm/cuda/peer_calls.cuh"
#include "comm/failure.hpp"
#include "core/hash.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/rank_agreement.hpp"

namespace crossdock::cuda {
namespace {

using comm::RendezvousHeader;

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

uint32_t CallLog::add(const char* operation, uint64_t subject, std::string_view config) {
  const uint32_t number = ++last_;
  const size_t place = (number - 1) % kMostCalls;
  if (place == calls_.size()) calls_.emplace_back();
  CallText& call = calls_[place];
  call.operation = operation;
  call.subject = subject;
  call.config.assign(config);
  return number;
}

const CallText* CallLog::find(uint32_t number) const {
  const bool is_kept = number >= 1 && number <= last_ && last_ - number < kMostCalls;
  return is_kept ? &calls_[(number - 1) % kMostCalls] : nullptr;
}

uint32_t hash_of_call(const char* operation, uint64_t subject, std::string_view config) {
  const std::span<const uint64_t> plan(&subject, 1);
  uint64_t hash = hash_bytes(std::string_view(operation));
  hash = hash_bytes(std::as_bytes(plan), hash);
  hash = hash_bytes(config, hash);
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

std::shared_ptr<Recovery> Recovery::of(Group& group) {
  std::shared_ptr<Recovery> shared = find(group);
  if (!shared) {
    shared = std::make_shared<Recovery>(group);
    comm::attachment_of(group) = shared;
  }
  return shared;
}

std::shared_ptr<Recovery> Recovery::find(Group& group) {
  return std::static_pointer_cast<Recovery>(comm::attachment_of(group).lock());
}

// Each rank stops queueing and tells its peers' kernels so. Once all hosts have met, no kernel
// waits for anything that is still to come, and the streams of all ranks drain. The hosts then
// compare what their devices have found, and resume. Memory that the calls use is not reused before
// the devices of all ranks have finished with it.
void Recovery::recover(RankAgreement& dispatcher, const std::optional<RefusedCall>& refused) {
  std::optional<CallAccount> own;
  if (refused) own = refused->account;
  const uint32_t number = own ? dispatcher.note_refused(own->call) : 0;
  const Operation operation = own ? operation_of(own->call.operation) : Operation::kPlan;
  for (RankAgreement* one : dispatchers_) {
    const bool refuses = own && one == &dispatcher;
    one->stop(refuses ? refused->lane : nullptr, refuses ? number : 0, operation);
  }
  meet_hosts();
  for (RankAgreement* one : dispatchers_) one->await_stop();
  std::optional<CallAccount> account;
  for (const RankAgreement* one : dispatchers_) {
    const bool has_refused = one == &dispatcher;
    if (!account) account = one->account(has_refused ? own : std::nullopt, number);
  }
  const Error error = explain_halt(group_, account);
  for (RankAgreement* one : dispatchers_) one->resume(error.context().sequence);
  throw error;
}

// Ranks that are meeting in another call get an error there, and come here when they find out why.
void Recovery::meet_hosts() {
  while (true) {
    try {
      group_.agree({.operation = comm::kStopOperation});
      return;
    } catch (const Error&) {
      if (group_.is_poisoned()) throw;
    }
  }
}

}  // namespace crossdock::cuda
