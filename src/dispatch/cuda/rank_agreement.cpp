#include "dispatch/cuda/rank_agreement.hpp"

#include <algorithm>

#include "comm/agreement/items.hpp"
#include "comm/failure.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"

namespace crossdock::cuda {
namespace {

// Precedes a rank's handles and news in its proposal.
struct ProposalHeader {
  int64_t num_handles;
  int64_t num_news;  // about its arena
  int64_t needs_barrier;
  int64_t has_waiting_room;
  int64_t num_slots;
};

}  // namespace

bool RankAgreement::runs_ahead(const RankStreams::Lane& lane) const {
  return ahead_.is_enabled() && lane.is_connected && peers_.grows_alone() &&
         !is_capturing(parts_.streams.stream_of(lane));
}

AgreedCall RankAgreement::agree(CallProposal proposal, int max_sms) {
  const bool has_refused = proposal.refusal != nullptr;
  if (!proposal.must_meet && runs_ahead(proposal.lane)) {
    CallText call{proposal.operation, proposal.subject, std::move(proposal.call_text)};
    if (has_refused) ahead_.refuse(proposal.lane, std::move(call), *proposal.refusal);
    AgreedCall agreed = agree_here(proposal, max_sms);
    agreed.needs_barrier = true;
    agreed.queued = ahead_.queue(call, agreed.handles.front());
    return agreed;
  }
  if (is_alone() && proposal.lane.is_connected && !has_refused) {
    return agree_here(proposal, max_sms);
  }
  return meet_hosts(std::move(proposal), max_sms);
}

// Without the other hosts.
AgreedCall RankAgreement::agree_here(CallProposal& proposal, int max_sms) {
  AgreedCall agreed;
  agreed.operation = proposal.operation;
  agreed.sequence = ahead_.next_sequence();
  agreed.num_slots = proposal.num_slots;
  agreed.has_waiting_room = has_waiting_room(proposal.lane, max_sms);
  agreed.handles.push_back(std::move(proposal.handles));
  parts_.streams.note_work(proposal.lane);
  return agreed;
}

AgreedCall RankAgreement::meet_hosts(CallProposal proposal, int max_sms) {
  RankStreams::Lane& lane = proposal.lane;
  std::vector<ChunkNotice> news;
  const std::optional<Error> refusal = refusal_of([&] {
    if (proposal.refusal != nullptr) throw Error(*proposal.refusal);
    if (!lane.is_connected) {
      const Buffer& mailbox = lane.channel->mailbox();
      const MemoryBlock block{.base = mailbox.data(), .num_bytes = mailbox.num_bytes()};
      proposal.handles.push_back(peers_.show(mailbox.data(), block));
    }
    news = peers_.news();
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
    ahead_.explain(lane, error);
    throw;
  }
  ahead_.note_meeting(agreement.sequence);
  peers_.note_heard(news);
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
    if (!of_peer.empty()) run_agreed(group(), [&] { peers_.hear(p, of_peer); });
  }
  if (!lane.is_connected) connect(proposal, agreed);
  parts_.streams.note_work(proposal.lane);
  return agreed;
}

// A rank that cannot reach a peer refuses before any rank launches a kernel that waits for it.
void RankAgreement::connect(const CallProposal& proposal, const AgreedCall& agreed) {
  RankStreams::Lane& lane = proposal.lane;
  const std::optional<Error> refusal = refusal_of([&] {
    int num_sharing = 1;
    PeerBases bases{};
    std::vector<std::byte*> mailboxes;
    std::vector<int> devices;
    for (int p = 0; p < group().size(); ++p) {
      const MemoryHandle& handle = agreed.handles[static_cast<size_t>(p)].back();
      const int slot = parts_.channel_ranks.slot_of(p);
      if (slot >= 0) {
        mailboxes.push_back(peers_.reach(p, handle));
        devices.push_back(handle.device);
      }
      const bool shares_gpu = handle.device == parts_.device && handle.is_shared == 0;
      if (p != group().rank() && shares_gpu) ++num_sharing;
      if (ahead_.is_enabled() && peers_.grows_alone()) {
        bases.base[p] = peers_.base_of(p);
      }
    }
    ahead_.note_peers(bases, num_sharing);
    lane.channel->connect(mailboxes);
    peers_.set_peer_devices(std::move(devices));
    lost_peers_.add(lane.channel);
    lost_peers_.set_watch(peers_.watch_owners(
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
               .take({.stream_id = stream_id, .sms = max_sms, .num_streams = ahead_.num_sharing()});
  }
  return room != nullptr;
}

std::vector<std::shared_ptr<const void>> RankAgreement::reservations() const {
  std::vector<std::shared_ptr<const void>> rooms;
  for (const auto& [request, room] : waiting_rooms_) rooms.push_back(room);
  return rooms;
}

void RankAgreement::await_peers(const RankStreams::Lane& lane, const AgreedCall& agreed,
                                Operation operation) const {
  const PeerSignals& signals = lane.channel->signals();
  const cudaStream_t stream = parts_.streams.stream_of(lane);
  if (agreed.is_queued()) {
    launch_exchange(signals, agreed.queued, operation, ahead_.bases(), stream);
  } else {
    launch_barrier(signals, operation, stream);
  }
}

}  // namespace crossdock::cuda
