#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>

/// For tests that fork while other threads run: a thread that allocates at that moment leaves the
/// child with a locked allocator, except with glibc's.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SKIP_IF_SANITIZED() GTEST_SKIP() << "sanitizers do not follow forks of several threads"
#else
#define SKIP_IF_SANITIZED()
#endif

namespace crossdock {

/// A child that takes longer is considered hung and killed.
inline constexpr unsigned kHangSeconds = 30;

/// Runs `body` in a forked child, which exits with the status that `body` returns. Returns that
/// status; -1 if the child was killed.
inline int exit_status_of_child(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kHangSeconds);
    _exit(body());
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace crossdock
