#include "comm/nccl/library.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "comm/waiting.hpp"
#include "core/check.hpp"
#include "core/process.hpp"
#include "core/threading.hpp"

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

namespace {

using comm::Clock;

// Threads that end communicators.
struct Endings {
  std::mutex mutex;
  std::condition_variable one_has_ended;
  int num_running = 0;
  Clock::time_point deadline{};  // the latest of all
  const uint64_t generation = fork_generation();
};

Endings& endings() {
  static auto* all = new Endings;  // never freed: used while the process exits
  return *all;
}

void wait_at_exit() {
  Endings& all = endings();
  if (all.generation != fork_generation()) return;  // a forked child has none of the threads
  std::unique_lock lock(all.mutex);
  all.one_has_ended.wait_until(lock, all.deadline, [&] { return all.num_running == 0; });
}

void note_begin(std::chrono::nanoseconds patience) {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(wait_at_exit); });
  const std::lock_guard lock(endings().mutex);
  ++endings().num_running;
  endings().deadline = std::max(endings().deadline, comm::deadline_after(Clock::now(), patience));
}

void note_end() {
  const std::lock_guard lock(endings().mutex);
  --endings().num_running;
  endings().one_has_ended.notify_all();
}

}  // namespace

void end_in_background(const NcclLibrary& library, ncclComm_t comm, NcclEnd end,
                       std::chrono::nanoseconds patience) noexcept {
  try {
    note_begin(patience);
    try {
      const auto finish = end == NcclEnd::kAbort ? library.comm_abort : library.comm_destroy;
      start_thread("the end of an NCCL communicator", [finish, comm] {
        finish(comm);
        note_end();
      }).detach();
    } catch (const std::exception&) {
      note_end();
    }
  } catch (const std::exception&) {
    // No memory for the list of threads: left as it is, as without a thread.
  }
}

}  // namespace crossdock::cuda
