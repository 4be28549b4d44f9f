#include "core/fork_generation.hpp"

#include <pthread.h>

#include <atomic>

namespace crossdock {
namespace {

std::atomic<uint64_t> generation = 0;

void after_fork_in_child() {
  ++generation;
}

}  // namespace

uint64_t fork_generation() noexcept {
  static const int kRegistered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
  static_cast<void>(kRegistered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace crossdock
