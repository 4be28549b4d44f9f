#include "core/fork_generation.hpp"

#include <pthread.h>

#include <atomic>

namespace crossdock {
namespace {

constinit std::atomic<uint64_t> generation = 0;

void after_fork_in_child() {
  ++generation;
}

// Registered when the library is loaded, which a fork cannot interrupt.
[[maybe_unused]] const int kRegistered = pthread_atfork(nullptr, nullptr, after_fork_in_child);

}  // namespace

uint64_t fork_generation() noexcept {
  return generation.load(std::memory_order_relaxed);
}

}  // namespace crossdock
