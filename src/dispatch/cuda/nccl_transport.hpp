#pragma once

#include <memory>
#include <span>

#include "comm/nccl/communicator.hpp"
#include "dispatch/cuda/row_transport.hpp"

// Only builds with NCCL may include this: nccl.h may be missing elsewhere.
namespace crossdock::cuda {

/// Grouped ncclSend and ncclRecv.
class NcclTransport final : public RowTransport {
 public:
  /// Uses a communicator that the caller has lent. Throws unless it has the group's ranks and is on
  /// the rank's GPU.
  NcclTransport(CudaRank& rank, const NcclLibrary& library, ncclComm_t lent);
  /// Uses the library's own communicator, which the dispatchers of a group share. The first plan
  /// makes it.
  NcclTransport(CudaRank& rank, const NcclLibrary& library);
  /// Aborts the library's own communicator if it has failed.
  ~NcclTransport() override;
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  void connect() override;
  void run(const GpuCall& call, size_t first_entry,
           std::span<const RowTransfer> transfers) override;

 private:
  void watch_exchanges();
  void queue(ncclComm_t comm, const RowTransfer& transfer, int peer, cudaStream_t stream) const;
  void await(ncclComm_t comm, ncclResult_t status) const;

  CudaRank& rank_;
  const NcclLibrary& library_;
  std::shared_ptr<NcclCommunicator> communicator_;  // null: not connected yet
};

}  // namespace crossdock::cuda
