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

#include "comm/wait_notice.hpp"
#include "core/threading.hpp"

namespace crossdock::comm {

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
