#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "comm/waiting.hpp"

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

/// Wakes threads that wait for something another thread does. A waiting thread reads the bell,
/// checks whether it can continue, and if not, waits. It misses nothing that was done before a ring
/// that comes after the reading.
///
/// Memory order: what ends a wait must be written and read in sequentially consistent order, or
/// before a ring().
class Bell {
 public:
  /// If threads may spin, they do so for a short time before they sleep. They should not if there
  /// are more threads than cores.
  explicit Bell(bool may_spin) : may_spin_(may_spin) {}

  bool may_spin() const { return may_spin_; }
  uint32_t read() const { return count_.load(); }

  /// Ends all waits.
  void ring();
  /// Ends the waits of threads that sleep. Spinning threads see for themselves what has been done.
  void wake() {
    if (num_asleep_.load() > 0) ring();
  }

  /// Returns when the bell no longer reads `seen` or is_over(), at the deadline, or earlier.
  template <typename IsOver>
  void wait(uint32_t seen, Clock::time_point deadline, const IsOver& is_over) {
    const auto has_ended = [&] { return is_over() || read() != seen; };
    if (may_spin_ && spin_until(has_ended)) return;
    num_asleep_.fetch_add(1);
    // Either this thread sees what another did, or the other sees that this one sleeps.
    if (!has_ended()) futex_wait(count_, seen, deadline - Clock::now());
    num_asleep_.fetch_sub(1);
  }

 private:
  // Longer than it takes to wake all ranks: otherwise, after sleeping once because one rank was
  // late, ranks would sleep in every exchange from then on.
  static constexpr std::chrono::microseconds kSpinTime{200};
  static constexpr int kLooksPerClock = 32;  // reading the clock takes longer than looking

  // Returns false if it has not ended after a while.
  template <typename HasEnded>
  static bool spin_until(const HasEnded& has_ended) {
    const auto give_up = Clock::now() + kSpinTime;
    do {
      for (int i = 0; i < kLooksPerClock; ++i) {
        if (has_ended()) return true;
        spin_once();
      }
    } while (Clock::now() < give_up);
    return false;
  }

  std::atomic<uint32_t> count_{0};  // a futex
  std::atomic<int> num_asleep_{0};  // threads that sleep, or are about to
  const bool may_spin_;
};

}  // namespace crossdock::comm
