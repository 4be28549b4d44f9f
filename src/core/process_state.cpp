#include "core/process_state.hpp"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

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

void leak(std::shared_ptr<const void> memory) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(memory));
}

}  // namespace crossdock
