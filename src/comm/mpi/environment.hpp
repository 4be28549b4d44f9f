#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "comm/waiting.hpp"
#include "core/threading.hpp"

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

/// Whether several threads may call MPI at once.
bool mpi_has_threads();

/// Throws the kTimeout of a call that was abandoned after `waited`.
[[noreturn]] void throw_abandoned_call(const std::string& what, std::chrono::nanoseconds waited);

/// The notice of a call that has not ended after `waited`.
WaitNotice notice_of_call(std::chrono::nanoseconds waited, std::chrono::nanoseconds deadline);

/// How long a call may take, and whom to tell if it takes long.
struct CallLimits {
  std::chrono::nanoseconds deadline{};
  OnceNotice notice{};
};

/// Runs a call that blocks in MPI until every process takes part. If it takes longer than
/// the deadline, throws kTimeout and abandons the call on its thread, so `call` must own what it
/// uses; MPI is then not finalised at exit. Throws kUnsupported if no thread can be started.
/// If MPI does not support threads, the call may block forever.
template <typename Result>
Result run_with_deadline(std::function<Result()> call, const std::string& what, CallLimits limits) {
  if (!mpi_has_threads()) return call();
  struct Outcome {
    std::mutex mutex;
    std::condition_variable has_ended;
    std::optional<Result> result;
    std::exception_ptr error;
  };
  const auto outcome = std::make_shared<Outcome>();
  start_thread("the wait for " + what, [outcome, call = std::move(call)] {
    std::optional<Result> result;
    std::exception_ptr error;
    try {
      result = call();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(outcome->mutex);
    outcome->result = std::move(result);
    outcome->error = error;
    outcome->has_ended.notify_all();
  }).detach();
  const auto ends_within = [&](std::chrono::nanoseconds time) {
    std::unique_lock lock(outcome->mutex);
    return outcome->has_ended.wait_for(lock, time,
                                       [&] { return outcome->result || outcome->error; });
  };
  const auto quiet = std::min(limits.deadline, limits.notice.due_after());
  bool ended = ends_within(quiet);
  if (!ended && quiet < limits.deadline) {
    limits.notice.say(notice_of_call(quiet, limits.deadline));
    ended = ends_within(limits.deadline - quiet);
  }
  if (!ended) throw_abandoned_call(what, limits.deadline);
  if (outcome->error) std::rethrow_exception(outcome->error);
  return std::move(*outcome->result);
}

}  // namespace crossdock::comm
