#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "dispatch/cuda/exchange_plan.hpp"
#include "dispatch/cuda/gpu_call.hpp"

namespace crossdock::cuda {

/// One exchange of rows between all ranks, on the device.
struct RowTransfer {
  const RowTraffic& traffic;
  const std::byte* send;  // [num_sent, row_bytes]
  std::byte* recv;        // [num_received, row_bytes]
  int64_t row_bytes;
  Operation operation;  // for messages
};

/// Exchanges packed rows between all ranks. All members are collective.
class RowTransport {
 public:
  virtual ~RowTransport() = default;

  /// (optional) Connects the ranks unless they are connected. Called at the beginning of every
  /// plan. Throws the same error on all ranks; the group stays usable.
  virtual void connect() {}

  /// (optional) Throws if transfers cannot be queued now. Called before the ranks agree on a call.
  virtual void check_usable(const GpuCall& /*call*/) const {}

  /// Queues transfers. The call has shown their send buffers as entries from `first_entry` on. Once
  /// the stream has executed the transfers, they are complete and send buffers may be reused.
  virtual void run(const GpuCall& call, size_t first_entry,
                   std::span<const RowTransfer> transfers) = 0;
};

/// Every rank copies its rows out of its peers' memory.
std::unique_ptr<RowTransport> make_peer_copies();

/// Through page-locked host memory and the group's communicator, for GPUs that do not reach each
/// other's memory. The host waits for the rows, so a call cannot be captured.
std::unique_ptr<RowTransport> make_staged_copies(CudaRank& rank);

/// Grouped ncclSend and ncclRecv on `nccl_comm`, an ncclComm_t whose ranks are the group's; null:
/// on the library's own communicator. Throws Error(kUnsupported) if built without NCCL, or if
/// libnccl cannot be opened.
std::unique_ptr<RowTransport> make_nccl_transport(CudaRank& rank, void* nccl_comm);

}  // namespace crossdock::cuda
