#include "comm/nccl/library.hpp"

#include "core/check.hpp"
#include "core/environment.hpp"
#include "core/opened_library.hpp"

namespace crossdock::cuda {
namespace {

constexpr const char* kVariable = "CROSSDOCK_NCCL_LIBRARY";
constexpr int kOldest = NCCL_VERSION(2, 14, 0);  // the first with non-blocking communicators
static_assert(NCCL_VERSION_CODE >= kOldest, "nccl.h must be from NCCL 2.14 or later");

// "2.28.9" for 22809. Versions before 2.9 had one digit less.
std::string version_text(int code) {
  const int major = code < 10000 ? code / 1000 : code / 10000;
  const int rest = code < 10000 ? code % 1000 : code % 10000;
  return concat(major, ".", rest / 100, ".", rest % 100);
}

OpenedLibrary open_file(const std::string& file) {
  try {
    return OpenedLibrary(file);
  } catch (const Error& error) {
    throw Error(ErrorCode::kUnsupported,
                concat(error.what(), "; GPU rows between nodes need NCCL: install it (Debian: ",
                       "libnccl2, PyPI: nvidia-nccl), or set ", kVariable, " to its path"));
  }
}

}  // namespace

NcclLibrary open_nccl(const std::string& file) {
  const OpenedLibrary opened = open_file(file);
  NcclLibrary library;
  opened.find("ncclGetVersion", library.get_version);
  int version = 0;
  if (library.get_version(&version) != ncclSuccess || version < kOldest) {
    throw Error(ErrorCode::kUnsupported, concat(file, " must be NCCL ", version_text(kOldest),
                                                " or later, is ", version_text(version)));
  }
  opened.find("ncclGetErrorString", library.get_error_string);
  opened.find("ncclGetLastError", library.get_last_error);
  opened.find("ncclGetUniqueId", library.get_unique_id);
  opened.find("ncclCommInitRankConfig", library.comm_init_rank_config);
  opened.find("ncclCommDestroy", library.comm_destroy);
  opened.find("ncclCommAbort", library.comm_abort);
  opened.find("ncclCommGetAsyncError", library.comm_get_async_error);
  opened.find("ncclCommCount", library.comm_count);
  opened.find("ncclCommUserRank", library.comm_user_rank);
  opened.find("ncclCommCuDevice", library.comm_cu_device);
  opened.find("ncclGroupStart", library.group_start);
  opened.find("ncclGroupEnd", library.group_end);
  opened.find("ncclSend", library.send);
  opened.find("ncclRecv", library.recv);
  return library;
}

const NcclLibrary& nccl_library() {
  static const NcclLibrary kLibrary = [] {
    const std::string file = environment_variable(kVariable);
    return open_nccl(!file.empty() ? file : "libnccl.so.2");
  }();
  return kLibrary;
}

void check_nccl(const NcclLibrary& library, ncclResult_t status, const char* call) {
  if (status == ncclSuccess) return;
  throw Error(ErrorCode::kCommunication, concat(call, ": ", library.get_error_string(status)));
}

}  // namespace crossdock::cuda
