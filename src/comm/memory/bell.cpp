#include "comm/memory/bell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace crossdock::comm {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Without FUTEX_PRIVATE_FLAG, so processes may share the word.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout) {
  const auto ns = std::max<int64_t>(0, timeout.count());
  const timespec time{.tv_sec = static_cast<time_t>(ns / 1'000'000'000),
                      .tv_nsec = static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &time, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::ring() {
  count_.fetch_add(1);
  if (num_asleep_.load() > 0) futex_wake(count_);
}

}  // namespace crossdock::comm
