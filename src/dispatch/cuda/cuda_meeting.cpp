// How a rank meets the others in a call, and what it shows them.

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

// What a rank brings to a meeting, ahead of its handles.
struct MeetingHeader {
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

CudaRank::Met CudaRank::meet(Meeting meeting) {
  if (!lane().is_connected) {
    const Buffer& mailbox = lane().channel->mailbox();
    meeting.handles.push_back(peers_.show(mailbox.data(), {mailbox.data(), mailbox.num_bytes()}));
  }
  const MeetingHeader own{.num_handles = std::ssize(meeting.handles),
                          .needs_barrier = meeting.needs_barrier,
                          .has_waiting_room = has_waiting_room()};
  std::vector<std::byte> body(sizeof(own) + meeting.handles.size() * sizeof(MemoryHandle));
  std::memcpy(body.data(), &own, sizeof(own));
  std::memcpy(body.data() + sizeof(own), meeting.handles.data(), body.size() - sizeof(own));
  const bool has_plan = meeting.plan != nullptr && meeting.plan->valid();
  const uint64_t subject = has_plan ? meeting.plan->id() : 0;
  Agreement agreement;
  try {
    agreement = group().agree({.operation = meeting.operation,
                               .subject = subject,
                               .config = std::move(meeting.call_text),
                               .body = body,
                               .rejection = meeting.refusal ? &*meeting.refusal : nullptr});
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
  Met met;
  met.operation = meeting.operation;
  met.sequence = agreement.sequence;
  for (int p = 0; p < group().size(); ++p) {
    const std::span<const std::byte> bytes = agreement.body(p);
    MeetingHeader header{};
    std::memcpy(&header, bytes.data(), sizeof(header));
    met.needs_barrier = met.needs_barrier || header.needs_barrier != 0;
    met.has_waiting_room = met.has_waiting_room && header.has_waiting_room != 0;
    std::vector<MemoryHandle> handles(static_cast<size_t>(header.num_handles));
    std::memcpy(handles.data(), bytes.data() + sizeof(header),
                handles.size() * sizeof(MemoryHandle));
    met.handles.push_back(std::move(handles));
  }
  if (!lane().is_connected) connect(meeting.operation, subject, met);
  has_queued_ = has_queued_ || !is_aside_;
  return met;
}

// Reaching memory for the first time may wait for the device, so the ranks meet again before any of
// them launches a kernel that waits for the others.
void CudaRank::connect(const char* operation, uint64_t subject, const Met& met) {
  const std::optional<Error> refusal = refusal_of([&] {
    num_sharing_ = 1;
    std::vector<std::byte*> mailboxes;
    std::vector<int> devices;
    for (int p = 0; p < group().size(); ++p) {
      const MemoryHandle& handle = met.handles[static_cast<size_t>(p)].back();
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
