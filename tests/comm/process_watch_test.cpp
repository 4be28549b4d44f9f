#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "comm/child_process.hpp"
#include "comm/polled/process_end.hpp"

namespace crossdock::comm {
namespace {

TEST(ProcessWatch, KnowsThisProcess) {
  const ProcessIdentity self = identify_this_process();
  EXPECT_EQ(self.pid, getpid());
  EXPECT_GT(self.start_ticks, 0u);
  EXPECT_TRUE(is_visible(self, self));
  EXPECT_FALSE(has_ended(self));
}

TEST(ProcessWatch, TellsALaterProcessWithTheSamePidApart) {
  ProcessIdentity former = identify_this_process();
  --former.start_ticks;
  EXPECT_TRUE(has_ended(former));
}

// A process may end after its file was opened and before it is read. Whether a check hits that
// moment is a matter of chance; of this many, some do.
TEST(ProcessWatch, LooksAtProcessesThatAreJustEnding) {
  for (int round = 0; round < 200; ++round) {
    ChildProcess child;
    const ProcessIdentity identity = child.identity();
    EXPECT_FALSE(has_ended(identity));
    std::atomic<bool> looks = false;
    std::jthread ending([&] {
      while (!looks) std::this_thread::yield();
      child.end();
    });
    looks = true;
    while (!has_ended(identity)) {
    }
    for (int look = 0; look < 20; ++look) EXPECT_TRUE(has_ended(identity));
  }
}

}  // namespace
}  // namespace crossdock::comm
