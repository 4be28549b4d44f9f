#include "core/check.hpp"
#include "dispatch/cuda/row_transport.hpp"

#if CROSSDOCK_HAS_NCCL
#include <nccl.h>
#endif

namespace crossdock::cuda {

#if CROSSDOCK_HAS_NCCL

namespace {

void check_nccl(ncclResult_t status, const char* call) {
  if (status == ncclSuccess) return;
  throw Error(ErrorCode::kCommunication, concat(call, ": ", ncclGetErrorString(status)));
}

class NcclTransport final : public RowTransport {
 public:
  NcclTransport(CudaRank& rank, ncclComm_t comm) : rank_(rank), comm_(comm) {
    int size = 0;
    int own = 0;
    check_nccl(ncclCommCount(comm, &size), "ncclCommCount");
    check_nccl(ncclCommUserRank(comm, &own), "ncclCommUserRank");
    CROSSDOCK_CHECK(size == rank.group().size() && own == rank.group().rank(),
                    "the NCCL communicator must have the group's ranks: it has rank ", own, " of ",
                    size, ", the group rank ", rank.group().rank(), " of ", rank.group().size());
  }

  void run(const CudaRank::Met& /*met*/, size_t /*first_entry*/,
           std::span<const RowTransfer> transfers) override {
    check_nccl(ncclGroupStart(), "ncclGroupStart");
    for (const RowTransfer& transfer : transfers) {
      for (int p = 0; p < rank_.group().size(); ++p) {
        const RowTraffic::Part& part = transfer.traffic.parts[static_cast<size_t>(p)];
        const auto bytes = [&](int64_t rows) {
          return static_cast<size_t>(rows * transfer.row_bytes);
        };
        if (part.send_count > 0) {
          check_nccl(ncclSend(transfer.send + bytes(part.send_begin), bytes(part.send_count),
                              ncclUint8, p, comm_, rank_.stream()),
                     "ncclSend");
        }
        if (part.recv_count > 0) {
          check_nccl(ncclRecv(transfer.recv + bytes(part.recv_begin), bytes(part.recv_count),
                              ncclUint8, p, comm_, rank_.stream()),
                     "ncclRecv");
        }
      }
    }
    check_nccl(ncclGroupEnd(), "ncclGroupEnd");
  }

 private:
  CudaRank& rank_;
  ncclComm_t comm_;
};

}  // namespace

std::unique_ptr<RowTransport> make_nccl_transport(CudaRank& rank, void* nccl_comm) {
  return std::make_unique<NcclTransport>(rank, static_cast<ncclComm_t>(nccl_comm));
}

#else

std::unique_ptr<RowTransport> make_nccl_transport(CudaRank& /*rank*/, void* /*nccl_comm*/) {
  throw Error(
      ErrorCode::kUnsupported,
      "this build has no NCCL; configure with CROSSDOCK_WITH_NCCL=ON where it is installed");
}

#endif

}  // namespace crossdock::cuda
