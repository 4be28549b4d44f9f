#pragma once

#include <mpi.h>

#include <functional>
#include <memory>
#include <vector>

namespace crossdock::comm {

/// Throws kCommunication with MPI's words unless `result` is MPI_SUCCESS. `peer` is the rank that
/// the call was about, if it was about one.
void check_mpi(int result, const char* call, int peer = -1);

/// Initialises MPI, with MPI_THREAD_MULTIPLE, if nobody has.
///
/// What is initialised here is finalised at exit. MPI_Finalize waits for all processes for ever, so
/// the processes first meet at a barrier that is polled: for the arrival deadline, or for the
/// progress deadline after a communicator has failed. If somebody does not come, MPI is left as it
/// is; the exit code of the process is the caller's in any case. (mpirun then reports that this
/// process ended without finalising, unless it runs with --enable-recovery.)
void ensure_mpi_is_initialized();

/// Whether MPI calls are possible at all: begun and not ended.
bool mpi_is_running();

/// A communicator has failed, so a process may be stuck or dead: see ensure_mpi_is_initialized.
void note_mpi_failure();

/// A call of MPI was given up and still runs: MPI is not finalised any more.
void note_mpi_is_stuck();

/// Requests that nobody waits for any more, and the memory that they name: kept until exit, or
/// until they have completed all the same.
struct AbandonedRequests {
  std::vector<MPI_Request> requests;
  std::vector<std::shared_ptr<const void>> memory;
};
void keep_until_exit(AbandonedRequests abandoned);

/// Calls `notice` when the process exits before this object is gone, and before MPI is finalised
/// here. Other threads may still run then.
class ExitNotice {
 public:
  explicit ExitNotice(std::function<void()> notice);
  ~ExitNotice();
  ExitNotice(const ExitNotice&) = delete;
  ExitNotice& operator=(const ExitNotice&) = delete;

 private:
  std::function<void()> notice_;
};

}  // namespace crossdock::comm
