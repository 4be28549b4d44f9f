#include "crossdock/recorder.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "core/event_ring.hpp"
#include "crossdock/error.hpp"
#include "support/file_size_limit.hpp"

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

TEST(EventRecorder, IsNotSharedWhereMemoryFilesMayNotGrow) {
  const test::FileSizeLimit limit(4096);
  EventRecorder recorder(1000, /*is_shared=*/true);
  { const EventRecorder::Scope scope(recorder, "plan", 1); }
  EXPECT_EQ(recorder.ring()->descriptor(), -1);
  EXPECT_EQ(recorder.events().size(), 1u);
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

TEST(EventRecorder, CutsNamesThatAreTooLong) {
  EventRecorder recorder(2);
  { const EventRecorder::Scope scope(recorder, "an operation with a very long name", 1); }
  EXPECT_STREQ(recorder.events().at(0).operation, "an operation with a ver");
}

TEST(EventRecorder, RemembersThePeersOfAnEvent) {
  EventRecorder recorder(2);
  {
    EventRecorder::Scope scope(recorder, "dispatch", 1);
    EventPeers peers;
    for (const int rank : {0, 63, 64, 1000}) peers.add(rank);
    scope.set_peers(peers);
  }
  const EventPeers peers = recorder.events().at(0).peers;
  EXPECT_EQ(peers.count, 4);
  EXPECT_EQ(peers.first_64, (uint64_t{1} << 63) + 1);
}

TEST(EventRing, OutlivesItsOwnerForThoseWhoHaveItOpen) {
  auto recorder = std::make_unique<EventRecorder>(4, /*is_shared=*/true);
  { const EventRecorder::Scope scope(*recorder, "plan", 1); }
  const auto seen = detail::EventRing::open(getpid(), recorder->ring()->descriptor());
  ASSERT_NE(seen, nullptr);
  { const EventRecorder::Scope scope(*recorder, "dispatch", 2); }
  recorder.reset();
  ASSERT_EQ(seen->events().size(), 2u);
  EXPECT_STREQ(seen->events()[1].operation, "dispatch");
}

TEST(EventRing, IsClaimedByOneOfAllWhoSeeIt) {
  EventRecorder recorder(4, /*is_shared=*/true);
  const auto seen = detail::EventRing::open(getpid(), recorder.ring()->descriptor());
  EXPECT_TRUE(seen->claim());
  EXPECT_FALSE(recorder.ring()->claim());
  EXPECT_FALSE(seen->claim());
}

TEST(EventRing, WhatCannotBeOpenedIsNull) {
  EXPECT_EQ(detail::EventRing::open(getpid(), 1000000), nullptr);
  EXPECT_EQ(EventRecorder(4).ring()->descriptor(), -1) << "not shared unless asked for";
}

TEST(EventRecorder, OffRecordsNothing) {
  EventRecorder recorder(0);
  { const EventRecorder::Scope scope(recorder, "plan", 1); }
  EXPECT_FALSE(recorder.is_on());
  EXPECT_TRUE(recorder.events().empty());
}

TEST(EventRecorder, RefusesMoreEventsThanCanBeCounted) {
  EXPECT_THROW(EventRecorder(-1), Error);
  EXPECT_THROW(EventRecorder(int64_t{1} << 62), Error);
}

}  // namespace
}  // namespace crossdock
