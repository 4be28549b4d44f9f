#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/exchange_plan.hpp"

namespace crossdock::cuda {

/// One exchange of rows between all ranks, on the device.
struct RowTransfer {
  const RowTraffic& traffic;
  const std::byte* send;  // [num_sent, row_bytes]
  std::byte* recv;        // [num_received, row_bytes]
  int64_t row_bytes;
  Operation operation;  // for messages
};

/// How rows that were packed for other ranks get to them. All members are collective.
class RowTransport {
 public:
  virtual ~RowTransport() = default;

  /// Queues transfers. Where their send buffers are stands in the meeting's handles, from
  /// `first_entry` on. They are done when the stream has come past them; send buffers may then be
  /// used again.
  virtual void run(const CudaRank::Met& met, size_t first_entry,
                   std::span<const RowTransfer> transfers) = 0;
};

/// Every rank copies what is for it out of its peers' memory.
std::unique_ptr<RowTransport> make_peer_copies(CudaRank& rank);

/// Grouped ncclSend and ncclRecv on `nccl_comm`, an ncclComm_t whose ranks are the group's. Throws
/// Error(kUnsupported) where NCCL is not built in.
std::unique_ptr<RowTransport> make_nccl_transport(CudaRank& rank, void* nccl_comm);

}  // namespace crossdock::cuda
