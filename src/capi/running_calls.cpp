#include "capi/running_calls.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/process_state.hpp"
#include "crossdock/crossdock.h"

namespace crossdock::capi {
namespace {

struct Calls {
  std::atomic<int64_t> num_running = 0;
  std::atomic<std::thread::id> ended_by{};  // the default: nobody
};

constinit PerProcess<Calls> all_calls;

}  // namespace

RunningCall::RunningCall() noexcept {
  Calls& calls = all_calls.get();
  ++calls.num_running;  // first: end_calls looks at the two in the opposite order
  const std::thread::id ended_by = calls.ended_by;
  if (ended_by == std::thread::id() || ended_by == std::this_thread::get_id()) return;
  --calls.num_running;
  hold_thread();
}

RunningCall::~RunningCall() {
  --all_calls.get().num_running;
}

bool have_calls_ended() noexcept {
  return all_calls.get().ended_by.load() != std::thread::id();
}

void hold_thread() noexcept {
  while (true) pause();
}

}  // namespace crossdock::capi

int32_t crossdock_end_calls(double seconds) {
  using std::chrono::steady_clock;
  using namespace crossdock::capi;
  Calls& calls = all_calls.get();
  calls.ended_by = std::this_thread::get_id();
  const auto deadline = steady_clock::now() + std::chrono::duration<double>(seconds);
  while (calls.num_running > 0) {
    if (steady_clock::now() >= deadline) return 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 1;
}
