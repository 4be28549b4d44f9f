#include "dispatch/cuda/nccl_transport.hpp"

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "comm/failure.hpp"
#include "comm/nccl/communicator.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/cuda/host_routing.hpp"

namespace crossdock::cuda {
namespace {

/// NCCL calls between construction and end() form one operation. After an error the destructor
/// closes the group; an open one would swallow the thread's later NCCL calls.
class NcclGroup {
 public:
  explicit NcclGroup(const NcclLibrary& library) : library_(library) {
    check_nccl(library_, library_.group_start(), "ncclGroupStart");
  }
  ~NcclGroup() {
    if (is_open_) library_.group_end();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  ncclResult_t end() {
    is_open_ = false;
    return library_.group_end();
  }

 private:
  const NcclLibrary& library_;
  bool is_open_ = true;
};

void check_members(const NcclLibrary& library, ncclComm_t comm, const CudaRank& rank) {
  int size = 0;
  int own = 0;
  int device = 0;
  check_nccl(library, library.comm_count(comm, &size), "ncclCommCount");
  check_nccl(library, library.comm_user_rank(comm, &own), "ncclCommUserRank");
  check_nccl(library, library.comm_cu_device(comm, &device), "ncclCommCuDevice");
  CROSSDOCK_CHECK(size == rank.group().size() && own == rank.group().rank(),
                  "the NCCL communicator must have the group's ranks: it has rank ", own, " of ",
                  size, ", the group rank ", rank.group().rank(), " of ", rank.group().size());
  CROSSDOCK_CHECK(device == rank.device(), "the NCCL communicator must be on GPU ", rank.device(),
                  ", as the routing is; it is on GPU ", device);
}

}  // namespace

NcclTransport::NcclTransport(CudaRank& rank, const NcclLibrary& library, ncclComm_t lent)
    : rank_(rank), library_(library) {
  check_members(library, lent, rank);
  communicator_ = std::make_shared<NcclCommunicator>(library, lent);
  watch_exchanges();
}

NcclTransport::NcclTransport(CudaRank& rank, const NcclLibrary& library)
    : rank_(rank), library_(library) {}

NcclTransport::~NcclTransport() {
  if (communicator_ && communicator_->is_own()) {
    const DeviceGuard guard(rank_.device(), std::nothrow);
    const RelaxedCapture relaxed;
    // Exchanges must end before the communicator is destroyed. After a failure they may never end.
    for (const RankStreams::Lane* lane : rank_.streams().lanes()) {
      if (!rank_.group().is_poisoned()) rank_.streams().ends_in_time(*lane);
    }
    if (rank_.group().is_poisoned()) communicator_->abort();
  }
  rank_.watch().set_probe({});
}

void NcclTransport::watch_exchanges() {
  StreamWatch::Probe probe{.error = [comm = communicator_] { return comm->async_error(); }};
  if (communicator_->is_own()) probe.abort = [comm = communicator_] { comm->abort(); };
  rank_.watch().set_probe(std::move(probe));
}

void NcclTransport::connect() {
  if (communicator_) return;
  const std::optional<Error> refusal = refusal_of([&] {
    rank_.check_usable();
    check_not_captured(rank_);
  });
  communicator_ = share_nccl_communicator(rank_.group(), {.library = library_,
                                                          .device = rank_.device(),
                                                          .config = rank_.context().config_text,
                                                          .refusal = as_refusal(refusal)});
  watch_exchanges();
}

void NcclTransport::run(const GpuCall& call, size_t /*first_entry*/,
                        std::span<const RowTransfer> transfers) {
  const cudaStream_t stream = call.stream();
  rank_.watch().begin_exchange(stream, call.agreed().operation, call.agreed().sequence);
  communicator_->use([&](ncclComm_t comm) {
    NcclGroup group(library_);
    for (const RowTransfer& transfer : transfers) {
      for (int p = 0; p < rank_.group().size(); ++p) queue(comm, transfer, p, stream);
    }
    await(comm, group.end());
  });
  rank_.watch().end_exchange(stream);
}

void NcclTransport::queue(ncclComm_t comm, const RowTransfer& transfer, int peer,
                          cudaStream_t stream) const {
  const RowTraffic::Part& part = transfer.traffic.parts[static_cast<size_t>(peer)];
  const auto bytes = [&](int64_t rows) { return static_cast<size_t>(rows * transfer.row_bytes); };
  // A non-blocking communicator may return ncclInProgress.
  const auto check_queued = [&](ncclResult_t status, const char* call) {
    if (status != ncclInProgress) check_nccl(library_, status, call);
  };
  if (part.send_count > 0) {
    check_queued(library_.send(transfer.send + bytes(part.send_begin), bytes(part.send_count),
                               ncclUint8, peer, comm, stream),
                 "ncclSend");
  }
  if (part.recv_count > 0) {
    check_queued(library_.recv(transfer.recv + bytes(part.recv_begin), bytes(part.recv_count),
                               ncclUint8, peer, comm, stream),
                 "ncclRecv");
  }
}

void NcclTransport::await(ncclComm_t comm, ncclResult_t status) const {
  const auto deadline =
      std::chrono::steady_clock::now() + *rank_.group().options().progress_deadline;
  while (status == ncclInProgress) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw Error(ErrorCode::kTimeout,
                  "NCCL did not queue an exchange within the progress deadline; are all ranks of "
                  "its communicator alive?");
    }
    std::this_thread::yield();
    check_nccl(library_, library_.comm_get_async_error(comm, &status), "ncclCommGetAsyncError");
  }
  check_nccl(library_, status, "ncclGroupEnd");
}

std::unique_ptr<RowTransport> make_nccl_transport(CudaRank& rank, void* nccl_comm) {
  const NcclLibrary& library = nccl_library();
  if (nccl_comm == nullptr) return std::make_unique<NcclTransport>(rank, library);
  return std::make_unique<NcclTransport>(rank, library, static_cast<ncclComm_t>(nccl_comm));
}

}  // namespace crossdock::cuda
