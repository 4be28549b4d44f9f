#pragma once

#include <nccl.h>

#include <chrono>
#include <string>

namespace crossdock::cuda {

/// The functions of NCCL that are called here. libnccl is not linked: it is opened when ranks first
/// need it, so a machine without NCCL can run everything else.
struct NcclLibrary {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetLastError) get_last_error = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclCommCount) comm_count = nullptr;
  decltype(&ncclCommUserRank) comm_user_rank = nullptr;
  decltype(&ncclCommCuDevice) comm_cu_device = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
};

/// The library that this process uses: CROSSDOCK_NCCL_LIBRARY, else libnccl.so.2 as the dynamic
/// linker finds it, which is the one that the process has already loaded, if any. Opened by the
/// first call. Throws Error(kUnsupported) if it is missing or too old; later calls try again.
const NcclLibrary& nccl_library();

/// Opens `file`, a path or a name; throws as above.
NcclLibrary open_nccl(const std::string& file);

/// Throws Error(kCommunication) with NCCL's message unless `status` is ncclSuccess.
void check_nccl(const NcclLibrary& library, ncclResult_t status, const char* call);

/// How an NCCL communicator ends.
enum class NcclEnd {
  kDestroy,  // after its operations have completed
  kAbort     // stops its operations, whose kernels may wait for a peer forever
};

/// Ends `comm` on a separate thread: NCCL does not return before the other ranks on this node have
/// ended theirs, and they may keep them. A process that exits waits for such threads, but at most
/// `patience` after this call. If no thread can be started, the communicator is left as it is.
void end_in_background(const NcclLibrary& library, ncclComm_t comm, NcclEnd end,
                       std::chrono::nanoseconds patience) noexcept;

}  // namespace crossdock::cuda
