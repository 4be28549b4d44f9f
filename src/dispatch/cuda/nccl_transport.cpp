#include "core/check.hpp"
#include "dispatch/cuda/row_transport.hpp"

#if CROSSDOCK_HAS_NCCL
#include <nccl.h>

#include <chrono>
#include <thread>
#endif

namespace crossdock::cuda {

#if CROSSDOCK_HAS_NCCL

namespace {

void check_nccl(ncclResult_t status, const char* call) {
  if (status == ncclSuccess) return;
  throw Error(ErrorCode::kCommunication, concat(call, ": ", ncclGetErrorString(status)));
}

// The communicator's asynchronous error, or "".
std::string async_error(ncclComm_t comm) {
  ncclResult_t status = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm, &status);
  if (asked != ncclSuccess) status = asked;
  const bool is_well = status == ncclSuccess || status == ncclInProgress;
  return is_well ? "" : ncclGetErrorString(status);
}

/// NCCL calls from its construction to end() are one operation. After an error the destructor
/// closes the group; an open one would swallow the thread's later NCCL calls.
class NcclGroup {
 public:
  NcclGroup() { check_nccl(ncclGroupStart(), "ncclGroupStart"); }
  ~NcclGroup() {
    if (is_open_) ncclGroupEnd();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  ncclResult_t end() {
    is_open_ = false;
    return ncclGroupEnd();
  }

 private:
  bool is_open_ = true;
};

class NcclTransport final : public RowTransport {
 public:
  NcclTransport(CudaRank& rank, ncclComm_t comm) : rank_(rank), comm_(comm) {
    int size = 0;
    int own = 0;
    int device = 0;
    check_nccl(ncclCommCount(comm, &size), "ncclCommCount");
    check_nccl(ncclCommUserRank(comm, &own), "ncclCommUserRank");
    check_nccl(ncclCommCuDevice(comm, &device), "ncclCommCuDevice");
    CROSSDOCK_CHECK(size == rank.group().size() && own == rank.group().rank(),
                    "the NCCL communicator must have the group's ranks: it has rank ", own, " of ",
                    size, ", the group rank ", rank.group().rank(), " of ", rank.group().size());
    CROSSDOCK_CHECK(device == rank.device(), "the NCCL communicator must be on GPU ", rank.device(),
                    ", as the routing is; it is on GPU ", device);
    rank.watch().set_probe([comm] { return async_error(comm); });
  }
  ~NcclTransport() override { rank_.watch().set_probe({}); }
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  // The caller owns the communicator, so it is never aborted here.
  void run(const CudaRank::Agreed& agreed, size_t /*first_entry*/,
           std::span<const RowTransfer> transfers) override {
    rank_.watch().begin_exchange(rank_.stream(), agreed.operation, agreed.sequence);
    NcclGroup group;
    for (const RowTransfer& transfer : transfers) {
      for (int p = 0; p < rank_.group().size(); ++p) queue(transfer, p);
    }
    await(group.end());
    rank_.watch().end_exchange(rank_.stream());
  }

 private:
  void queue(const RowTransfer& transfer, int peer) {
    const RowTraffic::Part& part = transfer.traffic.parts[static_cast<size_t>(peer)];
    const auto bytes = [&](int64_t rows) { return static_cast<size_t>(rows * transfer.row_bytes); };
    if (part.send_count > 0) {
      check_queued(ncclSend(transfer.send + bytes(part.send_begin), bytes(part.send_count),
                            ncclUint8, peer, comm_, rank_.stream()),
                   "ncclSend");
    }
    if (part.recv_count > 0) {
      check_queued(ncclRecv(transfer.recv + bytes(part.recv_begin), bytes(part.recv_count),
                            ncclUint8, peer, comm_, rank_.stream()),
                   "ncclRecv");
    }
  }

  // A non-blocking communicator may return ncclInProgress.
  static void check_queued(ncclResult_t status, const char* call) {
    if (status != ncclInProgress) check_nccl(status, call);
  }

  void await(ncclResult_t status) {
    const auto deadline =
        std::chrono::steady_clock::now() + *rank_.group().options().progress_deadline;
    while (status == ncclInProgress) {
      if (std::chrono::steady_clock::now() > deadline) {
        throw Error(ErrorCode::kTimeout,
                    "NCCL did not queue an exchange within the progress deadline; are all ranks of "
                    "its communicator alive?");
      }
      std::this_thread::yield();
      check_nccl(ncclCommGetAsyncError(comm_, &status), "ncclCommGetAsyncError");
    }
    check_nccl(status, "ncclGroupEnd");
  }

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
