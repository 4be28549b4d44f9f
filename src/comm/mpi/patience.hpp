#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/start_thread.hpp"

namespace crossdock::comm {

/// Whether MPI may be called by several threads at once.
bool mpi_has_threads();

/// What a call that was given up leaves: see run_patiently.
[[noreturn]] void give_up_on_mpi(const std::string& what, std::chrono::nanoseconds waited);

/// Runs a call that blocks in MPI until every process takes part, for at most `patience`. Past that
/// it throws kTimeout (kUnsupported where no thread can be started), and the call stays where it
/// is, on a thread of its own; MPI is then not finalised at exit. So `call` must own what it uses.
/// Without threads in MPI it may block for ever.
template <typename Result>
Result run_patiently(std::function<Result()> call, const std::string& what,
                     std::chrono::nanoseconds patience) {
  if (!mpi_has_threads()) return call();
  struct Outcome {
    std::mutex mutex;
    std::condition_variable is_there;
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
    outcome->is_there.notify_all();
  }).detach();
  std::unique_lock lock(outcome->mutex);
  const bool came =
      outcome->is_there.wait_for(lock, patience, [&] { return outcome->result || outcome->error; });
  if (!came) give_up_on_mpi(what, patience);
  if (outcome->error) std::rethrow_exception(outcome->error);
  return std::move(*outcome->result);
}

}  // namespace crossdock::comm
