#include "comm/nccl/ending.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "comm/deadlines.hpp"
#include "core/process_state.hpp"
#include "core/threading.hpp"

namespace crossdock::cuda {
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

// Returns false at the deadline.
bool wait_until(Clock::time_point deadline) {
  Endings& all = endings();
  std::unique_lock lock(all.mutex);
  return all.one_has_ended.wait_until(lock, deadline, [&] { return all.num_running == 0; });
}

void wait_at_exit() {
  if (endings().generation != fork_generation()) return;  // a forked child has none of the threads
  wait_until(endings().deadline);
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

bool await_endings(std::chrono::nanoseconds limit) {
  return wait_until(comm::deadline_after(Clock::now(), limit));
}

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
