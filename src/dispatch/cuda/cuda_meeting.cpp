// How a rank agrees with the others on a call, and what it shows them.

#include <cstring>
#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/waiting_room.hpp"
#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/fault_error.hpp"

namespace crossdock::cuda {
namespace {

// What a rank brings to an agreement, ahead of its handles.
struct ProposalHeader {
  int64_t num_handles;
  int64_t needs_barrier;
  int64_t has_waiting_room;
};

}  // namespace

bool CudaRank::has_waiting_room() {
  if (max_sms() <= 0) return false;
  const uint64_t stream_id = id_of(stream());
  std::shared_ptr<const void>& room = waiting_rooms_[{stream_id, max_sms()}];
  if (!room) {
    room = WaitingRoom::of(device_).take(
        {.stream_id = stream_id, .sms = max_sms(), .num_streams = num_sharing_});
  }
  return room != nullptr;
}

CudaRank::Agreed CudaRank::agree(Proposal proposal) {
  if (!lane().is_connected) {
    const Buffer& mailbox = lane().channel->mailbox();
    proposal.handles.push_back(peers_.show(mailbox.data(), {mailbox.data(), mailbox.num_bytes()}));
  }
  const ProposalHeader own{.num_handles = std::ssize(proposal.handles),
                           .needs_barrier = proposal.needs_barrier,
                           .has_waiting_room = has_waiting_room()};
  std::vector<std::byte> body(sizeof(own) + proposal.handles.size() * sizeof(MemoryHandle));
  std::memcpy(body.data(), &own, sizeof(own));
  std::memcpy(body.data() + sizeof(own), proposal.handles.data(), body.size() - sizeof(own));
  Agreement agreement;
  try {
    agreement = group().agree({.operation = proposal.operation,
                               .subject = proposal.subject,
                               .config = std::move(proposal.call_text),
                               .body = body,
                               .rejection = proposal.refusal});
  } catch (const Error&) {
    // If the reason was a routing that the device refused, it is on all ranks, and this was its
    // report; a rank whose device had not come so far would report it again.
    if (!group().is_poisoned() && !is_capturing(stream())) {
      watch_->try_await(stream());  // if it does not end, the next call says so
      for (const Lane* lane : lanes()) {
        const std::optional<Fault> fault = lane->channel->fault();
        if (fault && !is_fatal(*fault)) lane->channel->clear_fault();
      }
    }
    throw;
  }
  Agreed agreed;
  agreed.operation = proposal.operation;
  agreed.sequence = agreement.sequence;
  for (int p = 0; p < group().size(); ++p) {
    const std::span<const std::byte> bytes = agreement.body(p);
    ProposalHeader header{};
    std::memcpy(&header, bytes.data(), sizeof(header));
    agreed.needs_barrier = agreed.needs_barrier || header.needs_barrier != 0;
    agreed.has_waiting_room = agreed.has_waiting_room && header.has_waiting_room != 0;
    std::vector<MemoryHandle> handles(static_cast<size_t>(header.num_handles));
    std::memcpy(handles.data(), bytes.data() + sizeof(header),
                handles.size() * sizeof(MemoryHandle));
    agreed.handles.push_back(std::move(handles));
  }
  if (!lane().is_connected) connect(proposal.operation, proposal.subject, agreed);
  has_queued_ = has_queued_ || !is_aside_;
  return agreed;
}

// Reaching memory for the first time may wait for the device, so the ranks agree again before any
// of them launches a kernel that waits for the others.
void CudaRank::connect(const char* operation, uint64_t subject, const Agreed& agreed) {
  const std::optional<Error> refusal = refusal_of([&] {
    num_sharing_ = 1;
    std::vector<std::byte*> mailboxes;
    std::vector<int> devices;
    for (int p = 0; p < group().size(); ++p) {
      const MemoryHandle& handle = agreed.handles[static_cast<size_t>(p)].back();
      if (channel_ranks_.slot_of(p) >= 0) {
        mailboxes.push_back(peers_.reach(p, handle));
        devices.push_back(handle.device);
      }
      const bool shares_gpu = handle.device == device_ && handle.is_shared == 0;
      if (p != group().rank() && shares_gpu) ++num_sharing_;
    }
    lane().channel->connect(mailboxes);
    peers_.set_peer_devices(std::move(devices));
  });
  group().agree({.operation = operation,
                 .subject = subject,
                 .under_way = true,
                 .rejection = refusal ? &*refusal : nullptr});
  lane().is_connected = true;
}

ShownMemory CudaRank::show(const void* data, int64_t num_bytes, bool with_contents) {
  ShownMemory shown;
  if (num_bytes == 0) data = nullptr;
  shown.data = static_cast<std::byte*>(const_cast<void*>(data));
  shown.wanted = shown.data;
  shown.num_bytes = num_bytes;
  std::optional<MemoryBlock> block = pool_.find(data);
  if (!block && data != nullptr && peers_.needs_copy(data)) {
    copied_bytes_ += num_bytes;
    const Buffer copy = pool_.take(num_bytes, stream());
    shown.lease = copy.owner();
    shown.data = copy.data();
    block = pool_.find(shown.data);
    if (with_contents) {
      CROSSDOCK_CUDA(cudaMemcpyAsync(shown.data, data, static_cast<size_t>(num_bytes),
                                     cudaMemcpyDeviceToDevice, stream()));
    }
  }
  if (!block) block = MemoryBlock{.base = shown.data, .num_bytes = num_bytes};
  shown.handle = peers_.show(shown.data, *block);
  return shown;
}

void CudaRank::fetch(const ShownMemory& shown) const {
  if (!shown.lease) return;
  CROSSDOCK_CUDA(cudaMemcpyAsync(shown.wanted, shown.data, static_cast<size_t>(shown.num_bytes),
                                 cudaMemcpyDeviceToDevice, stream()));
}

}  // namespace crossdock::cuda
