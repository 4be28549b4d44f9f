// What languages need whose callbacks may not return, and whose runtime may end before the process.
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "capi/c_ranks.hpp"
#include "support/forked_child.hpp"

namespace crossdock::capi_test {
namespace {

// One dispatch of a group with one rank, whose chunk goes to `callback`.
crossdock_status dispatch_chunk(const Planned& planned, const Case& input,
                                void (*callback)(crossdock_chunk*)) {
  crossdock_chunk chunk{};
  chunk.callback = callback;
  auto args = made<crossdock_dispatch_args>();
  args.x = tensor(input.x, input.T, Case::D);
  args.on_chunk = crossdock_pass_chunk;
  args.on_chunk_context = &chunk;
  auto sent = made<crossdock_dispatch_result>();
  const crossdock_status status =
      crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent);
  EXPECT_EQ(crossdock_output_release(&sent.rows, nullptr), CROSSDOCK_OK);
  return status;
}

void succeed(crossdock_chunk* chunk) {
  const bool is_right = chunk->result->rows.tensor.shape[1] == Case::D &&
                        chunk->first_expert == 0 && chunk->last_expert == Case::E;
  if (is_right) chunk->status = CROSSDOCK_OK;
}

TEST(PassChunk, AChunkFailsUnlessItsCallbackSetsTheStatus) {
  run_c_ranks(1, [](crossdock_group* group, int rank) {
    const Case input(rank);
    const Planned planned(group, input);
    EXPECT_OK(dispatch_chunk(planned, input, succeed));
    EXPECT_EQ(dispatch_chunk(planned, input, [](crossdock_chunk*) {}), CROSSDOCK_COMMUNICATION);
  });
}

std::atomic<bool> is_in_callback = false;
std::atomic<bool> may_return = false;

template <typename Condition>
bool comes_true(const Condition& condition, std::chrono::milliseconds time) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  while (!condition() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

// Ends the calls of this process while a thread is in a callback. The thread's next call, the
// release of the output, does not return. Returns 0 if all is as it should be.
int end_calls() {
  crossdock_group* group = nullptr;
  if (crossdock_group_from_threads(1, nullptr, &group) != CROSSDOCK_OK) return 1;
  static std::atomic<bool> goes_on = false;
  std::thread([group] {
    const Case input(0);
    const Planned planned(group, input);
    static_cast<void>(dispatch_chunk(planned, input, [](crossdock_chunk* chunk) {
      is_in_callback = true;
      comes_true([] { return may_return.load(); }, std::chrono::seconds(kHangSeconds));
      chunk->status = CROSSDOCK_OK;
    }));
    goes_on = true;
  }).detach();
  const std::chrono::seconds long_enough(10);
  if (!comes_true([] { return is_in_callback.load(); }, long_enough)) return 2;
  if (crossdock_end_calls(0.01) != 0) return 3;
  may_return = true;
  if (crossdock_end_calls(10) != 1) return 4;
  if (comes_true([] { return goes_on.load(); }, std::chrono::milliseconds(20))) return 5;
  if (crossdock_group_check(group) != CROSSDOCK_OK) return 6;  // this thread goes on
  crossdock_group_destroy(group);
  return 0;
}

TEST(EndCalls, WaitsForRunningCallsAndHoldsThreadsThatMakeMore) {
  SKIP_IF_SANITIZED();
  EXPECT_EQ(exit_status_of_child(end_calls), 0);
}

// As Python does while it exits, the callback ends its thread. The library must not be unwound.
int end_thread_in_callback() {
  crossdock_group* group = nullptr;
  if (crossdock_group_from_threads(1, nullptr, &group) != CROSSDOCK_OK) return 1;
  std::thread([group] {
    const Case input(0);
    const Planned planned(group, input);
    dispatch_chunk(planned, input, [](crossdock_chunk*) {
      is_in_callback = true;
      pthread_exit(nullptr);
    });
  }).detach();
  if (!comes_true([] { return is_in_callback.load(); }, std::chrono::seconds(10))) return 2;
  return crossdock_end_calls(0.1);  // 0: the thread is still in the call
}

TEST(EndCalls, AThreadThatEndsInACallbackIsHeld) {
  SKIP_IF_SANITIZED();
  EXPECT_EQ(exit_status_of_child(end_thread_in_callback), 0);
}

}  // namespace
}  // namespace crossdock::capi_test
