#include "comm/mpi/environment.hpp"

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>

#include "comm/mpi/closing.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"
#include "core/descriptor.hpp"

namespace crossdock::comm {
namespace {

/// The MPI that this process has initialised and must finalise.
struct OwnMpi {
  MPI_Comm exit_communicator = MPI_COMM_NULL;
  std::chrono::nanoseconds exit_deadline{};
  std::chrono::nanoseconds exit_deadline_after_failure{};
};

std::atomic<bool> has_failed = false;
std::atomic<bool> is_stuck = false;
OwnMpi own_mpi;  // written once, under call_once

bool all_processes_reach_exit() {
  MPI_Request barrier = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(own_mpi.exit_communicator, &barrier) != MPI_SUCCESS) return false;
  const auto start = Clock::now();
  while (true) {
    int done = 0;
    if (MPI_Test(&barrier, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (done != 0) return true;
    const auto limit = has_failed ? own_mpi.exit_deadline_after_failure : own_mpi.exit_deadline;
    if (Clock::now() > deadline_after(start, limit)) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void finalize_at_exit() {
  if (!mpi_is_running() || is_stuck || !all_processes_reach_exit()) return;
  give_up_closing();
  MPI_Finalize();
}

void initialize() {
  own_mpi.exit_deadline = default_arrival_deadline();
  own_mpi.exit_deadline_after_failure = default_progress_deadline();
  int provided = 0;
  const StandardDescriptorGuard guard;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  std::atexit(finalize_at_exit);
  const std::function<MPI_Comm()> duplicate_world = [] {
    MPI_Comm copy = MPI_COMM_NULL;
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &copy), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
    return copy;
  };
  own_mpi.exit_communicator = run_with_deadline(duplicate_world, "all processes to start",
                                                {.deadline = own_mpi.exit_deadline});
}

}  // namespace

void check_mpi(int result, const char* call, int peer) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw Error(ErrorCode::kCommunication, concat(call, " failed: ", text), {.culprit = peer});
}

void ensure_mpi_is_initialized() {
  static std::once_flag once;
  std::call_once(once, [] {
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized == 0) initialize();
  });
  CROSSDOCK_CHECK(mpi_is_running(),
                  "MPI has already been finalised; make communicators before that");
}

bool mpi_is_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

void note_mpi_failure() {
  has_failed = true;
}

void note_mpi_is_stuck() {
  is_stuck = true;
}

bool mpi_has_threads() {
  int level = MPI_THREAD_SINGLE;
  return MPI_Query_thread(&level) == MPI_SUCCESS && level == MPI_THREAD_MULTIPLE;
}

void throw_abandoned_call(const std::string& what, std::chrono::nanoseconds waited) {
  note_mpi_is_stuck();
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  throw Error(ErrorCode::kTimeout,
              concat("process ", rank, " of ", size, ": waited ", to_seconds_text(waited), " for ",
                     what, "; are all of them running, and are the links between them up?"),
              {.culprit = -1, .sequence = 0, .operation = "set-up"});
}

WaitNotice notice_of_call(std::chrono::nanoseconds waited, std::chrono::nanoseconds deadline) {
  WaitNotice notice{
      .awaited = {}, .operation = "set-up", .waited = waited, .left = deadline - waited};
  MPI_Comm_rank(MPI_COMM_WORLD, &notice.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &notice.size);
  return notice;
}

}  // namespace crossdock::comm
