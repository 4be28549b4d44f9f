#pragma once

namespace crossdock::comm {

/// Throws kCommunication with MPI's message unless `result` is MPI_SUCCESS. `peer` is the rank that
/// the call addressed, if any.
void check_mpi(int result, const char* call, int peer = -1);

/// Initialises MPI, with MPI_THREAD_MULTIPLE, unless it is initialised already.
///
/// If MPI is initialised here, it is finalised at exit. MPI_Finalize waits for all processes
/// without a deadline, so the processes first wait at a barrier that is polled: for the arrival
/// deadline, or for the progress deadline after a communicator has failed. If a process is missing
/// by then, MPI is not finalised; this process keeps its exit code in any case. (mpirun then
/// reports that this process ended without finalising, unless it runs with --enable-recovery.)
void ensure_mpi_is_initialized();

/// Whether MPI is initialised and not finalised, so it can be called.
bool mpi_is_running();

/// Notes that a communicator has failed, so a process may be stuck or dead: see
/// ensure_mpi_is_initialized.
void note_mpi_failure();

/// Notes that an MPI call was abandoned and is still running: MPI will not be finalised.
void note_mpi_is_stuck();

}  // namespace crossdock::comm
