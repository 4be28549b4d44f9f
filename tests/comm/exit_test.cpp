// A child is forked while its parent exits, or makes or ends communicators. Locks that another
// thread of the parent holds at that moment must not block the child.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <semaphore>
#include <thread>
#include <utility>
#include <vector>

#include "comm/polled/process_end.hpp"
#include "comm/sockets/endpoint.hpp"
#include "core/process.hpp"
#include "support/forked_child.hpp"

namespace crossdock::comm {
namespace {

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
  EXPECT_EQ(exit_status_of_child([] {
              const std::lock_guard lock_in_child(locked.get().mutex);
              if (locked.get().value != 5) return 1;
              locked.get().value = 7;
              return locked.get().value == 7 ? 0 : 2;
            }),
            0);
  EXPECT_EQ(&locked.get(), &own);
  EXPECT_EQ(own.value, 6);
}

TEST(ExitNotice, DoesNotStopAChildThatIsForkedWhileNoticesAreGiven) {
  SKIP_IF_SANITIZED();
  const int status = exit_status_of_child([]() -> int {
    std::binary_semaphore is_exiting{0};
    std::thread([&] {
      is_exiting.acquire();
      const int child_status = exit_status_of_child([] {
        const ExitNotice notice([] {});
        return 0;
      });
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
  EXPECT_EQ(exit_status_of_child([]() -> int { std::exit(0); }), 0);
}

TEST(Linger, DoesNotStopAChildThatIsForkedWhileTheParentWaitsForItsPeers) {
  SKIP_IF_SANITIZED();
  const int status = exit_status_of_child([]() -> int {
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return 4;
    if (send(ends[0], "unread", 6, MSG_NOSIGNAL) != 6) return 5;
    std::vector<Socket> sockets;
    sockets.emplace_back(ends[0]);
    close_gently(std::move(sockets));
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // most likely it exits by then
      const int child_status = exit_status_of_child([] {
        close_gently({});
        return 0;
      });
      _exit(child_status == 0 ? 0 : 1);
    }).detach();
    std::exit(0);  // waits until the peer has read everything, for at most two seconds
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace crossdock::comm
