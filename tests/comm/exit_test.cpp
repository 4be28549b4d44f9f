// A child that is forked while its parent exits, or makes or ends communicators: locks that another
// thread of the parent holds at that moment must not stop it.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <semaphore>
#include <thread>
#include <utility>
#include <vector>

#include "comm/exit_notice.hpp"
#include "comm/sockets/linger.hpp"
#include "core/per_process.hpp"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SKIP_IF_SANITIZED() GTEST_SKIP() << "sanitizers do not follow forks of several threads"
#else
#define SKIP_IF_SANITIZED()
#endif

namespace crossdock::comm {
namespace {

constexpr unsigned kHangSeconds = 30;

/// Runs `body` in a forked process; returns its wait status. A process that hangs is killed.
int status_of_child(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kHangSeconds);
    body();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

struct Locked {
  std::mutex mutex;
  int value = 5;
};
constinit PerProcess<Locked> locked;

TEST(PerProcess, IsNewInAForkedChild) {
  SKIP_IF_SANITIZED();
  Locked& own = locked.get();
  own.value = 6;
  const std::lock_guard lock(own.mutex);
  EXPECT_EQ(status_of_child([] {
              const std::lock_guard lock_in_child(locked.get().mutex);
              if (locked.get().value != 5) _exit(1);
              locked.get().value = 7;
              if (locked.get().value != 7) _exit(2);
            }),
            0);
  EXPECT_EQ(&locked.get(), &own);
  EXPECT_EQ(own.value, 6);
}

TEST(ExitNotice, DoesNotStopAChildThatIsForkedWhileNoticesAreGiven) {
  SKIP_IF_SANITIZED();
  const int status = status_of_child([] {
    std::binary_semaphore is_exiting{0};
    std::thread([&] {
      is_exiting.acquire();
      const int child_status = status_of_child([] { const ExitNotice notice([] {}); });
      _exit(child_status == 0 ? 0 : 1);
    }).detach();
    const ExitNotice notice([&] {
      is_exiting.release();
      std::this_thread::sleep_for(std::chrono::seconds(2 * kHangSeconds));  // until _exit
    });
    std::exit(3);
  });
  EXPECT_EQ(status, 0);
}

TEST(ExitNotice, IsNotGivenByAForkedChild) {
  SKIP_IF_SANITIZED();
  const ExitNotice notice([] { _exit(1); });
  EXPECT_EQ(status_of_child([] { std::exit(0); }), 0);
}

TEST(Linger, DoesNotStopAChildThatIsForkedWhileTheParentWaitsForItsPeers) {
  SKIP_IF_SANITIZED();
  const int status = status_of_child([] {
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) _exit(4);
    if (send(ends[0], "unread", 6, MSG_NOSIGNAL) != 6) _exit(5);
    std::vector<Socket> sockets;
    sockets.emplace_back(ends[0]);
    close_gently(std::move(sockets));
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // most likely it exits by then
      const int child_status = status_of_child([] { close_gently({}); });
      _exit(child_status == 0 ? 0 : 1);
    }).detach();
    std::exit(0);  // waits until the peer has read everything, for at most two seconds
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace crossdock::comm
