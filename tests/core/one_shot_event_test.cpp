#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <semaphore>
#include <thread>
#include <utility>

#include "core/threading.hpp"

namespace crossdock {
namespace {

using namespace std::chrono_literals;

TEST(OneShotEvent, CallsEachWatcherOnce) {
  OneShotEvent event;
  int first = 0;
  int second = 0;
  const auto watch_first = event.watch([&] { ++first; });
  const auto watch_second = event.watch([&] { ++second; });
  EXPECT_EQ(first, 0);
  event.fire();
  event.fire();
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 1);
}

TEST(OneShotEvent, CallsALateWatcherImmediately) {
  OneShotEvent event;
  event.fire();
  int calls = 0;
  const auto watch = event.watch([&] { ++calls; });
  EXPECT_EQ(calls, 1);
  event.fire();
  EXPECT_EQ(calls, 1);
}

TEST(OneShotEvent, DoesNotCallAWatcherThatIsGone) {
  OneShotEvent event;
  int calls = 0;
  {
    const auto gone = event.watch([&] { ++calls; });
  }
  event.fire();
  EXPECT_EQ(calls, 0);
}

TEST(OneShotEvent, MayEndBeforeItsWatchers) {
  std::optional<OneShotEvent> event(std::in_place);
  const auto watch = event->watch([] {});
  event.reset();
}

TEST(OneShotEvent, EndsAWatchOnlyAfterItsRunningCallback) {
  OneShotEvent event;
  std::binary_semaphore has_begun{0};
  std::atomic<bool> has_ended = false;
  auto watch = event.watch([&] {
    has_begun.release();
    std::this_thread::sleep_for(50ms);
    has_ended = true;
  });
  std::jthread firing([&] { event.fire(); });
  has_begun.acquire();
  watch.reset();
  EXPECT_TRUE(has_ended);
}

}  // namespace
}  // namespace crossdock
