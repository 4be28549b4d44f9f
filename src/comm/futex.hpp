#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

// Waiting for a word in memory to change. The word may be shared between processes.

namespace crossdock::comm {

/// Tells the core that this thread is spinning.
inline void spin_once() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Sleeps while `word` is `expected`, at most for `timeout`. May return earlier.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout);

/// Wakes all threads that sleep on the word.
void futex_wake(std::atomic<uint32_t>& word);

}  // namespace crossdock::comm
