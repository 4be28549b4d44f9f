#include "crossdock/recorder.hpp"

#include <gtest/gtest.h>

namespace crossdock {
namespace {

TEST(EventRecorder, RecordsOperationSequenceBytesBeginAndEnd) {
  EventRecorder recorder(8);
  {
    EventRecorder::Scope scope(recorder, "dispatch", 12, 100);
    ASSERT_EQ(recorder.events().size(), 1u);
    EXPECT_EQ(recorder.events()[0].end_ns, 0) << "still under way";
    scope.set_bytes(200);
  }
  const Event event = recorder.events().at(0);
  EXPECT_STREQ(event.operation, "dispatch");
  EXPECT_EQ(event.sequence, 12u);
  EXPECT_EQ(event.bytes, 200);
  EXPECT_GE(event.end_ns, event.begin_ns);
}

TEST(EventRecorder, KeepsTheLastEventsOldestFirst) {
  EventRecorder recorder(3);
  for (uint64_t i = 1; i <= 5; ++i) const EventRecorder::Scope scope(recorder, "plan", i);
  const std::vector<Event> events = recorder.events();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].sequence, 3u);
  EXPECT_EQ(events[2].sequence, 5u);
}

TEST(EventRecorder, AnOuterScopeMayEndAfterItsPlaceWasTaken) {
  EventRecorder recorder(2);
  {
    const EventRecorder::Scope outer(recorder, "outer", 1);
    for (uint64_t i = 2; i <= 4; ++i) const EventRecorder::Scope inner(recorder, "inner", i);
  }
  for (const Event& event : recorder.events()) EXPECT_STREQ(event.operation, "inner");
}

TEST(EventRecorder, OffRecordsNothing) {
  EventRecorder recorder(0);
  { const EventRecorder::Scope scope(recorder, "plan", 1); }
  EXPECT_FALSE(recorder.is_on());
  EXPECT_TRUE(recorder.events().empty());
}

}  // namespace
}  // namespace crossdock
