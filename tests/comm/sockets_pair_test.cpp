// Two processes share one connection, whoever opens it. Here both are in this process, so the test
// decides who does what when.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "comm/sockets/endpoint.hpp"

namespace crossdock::comm {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

constexpr uint64_t kCommId = 1;
constexpr int64_t kWindowBytes = 2048;

/// The control message with this number.
ControlMessage message(uint64_t number) {
  ControlMessage made;
  made.kind = ControlMessage::Kind::kQuestion;
  made.exchange = number;
  return made;
}

std::byte byte_at(size_t position) {
  return static_cast<std::byte>(position % 251);
}

/// One of the two, and everything that it has sent and received.
struct Side {
  std::unique_ptr<Endpoint> endpoint;
  int peer = 0;
  uint64_t num_messages_sent = 0;
  size_t num_bytes_sent = 0;
  std::vector<uint64_t> messages;  // numbers, as received
  Bytes bytes;                     // as received

  void send_message() { endpoint->send_control(kCommId, peer, message(num_messages_sent++)); }
  void write(size_t max_bytes) {
    Bytes next(max_bytes);
    for (size_t i = 0; i < max_bytes; ++i) next[i] = byte_at(num_bytes_sent + i);
    num_bytes_sent += endpoint->write(kCommId, peer, next);
  }
  void take() {
    while (const auto taken = endpoint->take_control(kCommId)) {
      messages.push_back(taken->second.exchange);
    }
    std::array<std::byte, 700> next{};
    const size_t num_bytes = endpoint->read(kCommId, peer, next);
    bytes.insert(bytes.end(), next.begin(), next.begin() + static_cast<ptrdiff_t>(num_bytes));
  }
  void poll() {
    endpoint->poll();
    take();
  }
  /// Passes everything to the kernel.
  void flush() {
    while (endpoint->has_unsent()) poll();
  }
  /// Checks that everything that `other` has sent was received once and in order.
  void expect_all_of(const Side& other) const {
    ASSERT_EQ(messages.size(), other.num_messages_sent);
    for (size_t i = 0; i < messages.size(); ++i) EXPECT_EQ(messages[i], i);
    ASSERT_EQ(bytes.size(), other.num_bytes_sent);
    for (size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], byte_at(i));
  }
};

/// Ranks 0 and 1. Silent strangers can keep both from accepting each other's connections; both then
/// open one.
class Pair {
 public:
  Pair() {
    std::array<Socket, 2> listeners;
    SocketsWorld world{.rank = 0, .blobs = std::vector<SocketsBlob>(2), .id = 7};
    for (size_t rank = 0; rank < 2; ++rank) {
      listeners[rank] = std::move(*listen_at(*parse_address("127.0.0.1", 0)));
      world.blobs[rank].address = address_of(listeners[rank]);
      world.blobs[rank].secret = make_secret();
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      world.rank = static_cast<int>(rank);
      sides_[rank].peer = 1 - world.rank;
      sides_[rank].endpoint = std::make_unique<Endpoint>(
          std::move(listeners[rank]), std::make_unique<Directory>(world.own().secret), world,
          SocketsOptions{.chunk_bytes = 500, .window_bytes = kWindowBytes},
          StrangerLimits{.max_strangers = 1, .busy_time = std::chrono::hours(1)});
      sides_[rank].endpoint->open_communicator(kCommId);
    }
  }

  Side& operator[](size_t rank) { return sides_[rank]; }

  /// Until unblock, `rank` accepts nothing.
  void block(size_t rank) {
    int error = 0;
    const auto& world = sides_[rank].endpoint->world();
    strangers_[rank] = start_connecting(world.own().address, error);
    ASSERT_EQ(error, 0);
    sides_[rank].endpoint->poll();  // accepts the stranger
    ++num_strangers_;
  }
  void unblock(size_t rank) { strangers_[rank].close(); }

  /// Polls both until the condition holds. Returns whether it does.
  bool poll_until(const std::function<bool()>& condition) {
    const auto end = Clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      if (Clock::now() > end) return false;
      for (Side& side : sides_) {
        if (side.endpoint) side.poll();
      }
      std::this_thread::yield();
    }
    return true;
  }

  /// Waits until everything has arrived, and checks it and the number of connections.
  void settle() {
    EXPECT_TRUE(poll_until([&] {
      return has_all(0) && has_all(1) && num_refused() == num_strangers_;
    })) << sides_[0].endpoint->num_connections()
        << " and " << sides_[1].endpoint->num_connections() << " connections, " << num_refused()
        << " refused";
    for (size_t rank = 0; rank < 2; ++rank) {
      sides_[rank].expect_all_of(sides_[1 - rank]);
      EXPECT_FALSE(sides_[rank].endpoint->end_of(sides_[rank].peer).has_value());
      EXPECT_EQ(sides_[rank].endpoint->counters().malformed_frames, 0);
    }
  }

 private:
  bool has_all(size_t rank) const {
    const Side& other = sides_[1 - rank];
    return sides_[rank].messages.size() >= other.num_messages_sent &&
           sides_[rank].bytes.size() >= other.num_bytes_sent &&
           sides_[rank].endpoint->num_connections() == 1;
  }
  int64_t num_refused() const {
    return sides_[0].endpoint->counters().refused_connections +
           sides_[1].endpoint->counters().refused_connections;
  }

  std::array<Side, 2> sides_;
  std::array<Socket, 2> strangers_;
  int64_t num_strangers_ = 0;
};

TEST(PairConnection, IsOpenedByTheFirstThatSends) {
  for (const size_t first : {0U, 1U}) {
    Pair pair;
    pair[first].send_message();
    EXPECT_TRUE(pair.poll_until([&] { return pair[1 - first].endpoint->num_connections() == 1; }));
    pair[1 - first].send_message();
    EXPECT_EQ(pair[0].endpoint->num_connections() + pair[1].endpoint->num_connections(), 2);
    pair.settle();
    for (int i = 0; i < 100; ++i) {
      for (const size_t rank : {0U, 1U}) {
        pair[rank].write(300);
        pair[rank].poll();
      }
    }
    EXPECT_GT(pair[0].num_bytes_sent, static_cast<size_t>(kWindowBytes));
    EXPECT_GT(pair[1].num_bytes_sent, static_cast<size_t>(kWindowBytes));
    pair.settle();
  }
}

TEST(PairConnection, IsThatOfTheLowerRankIfBothOpenOne) {
  Pair pair;
  for (const size_t rank : {0U, 1U}) pair.block(rank);
  for (const size_t rank : {0U, 1U}) {
    pair[rank].send_message();
    pair[rank].send_message();
    pair[rank].flush();
    pair[rank].write(100);
  }
  EXPECT_EQ(pair[0].num_bytes_sent, 100U);
  EXPECT_EQ(pair[1].num_bytes_sent, 0U);  // waits for a welcome
  // The lower rank reads the messages from the connection that will be closed.
  pair.unblock(0);
  EXPECT_TRUE(pair.poll_until([&] { return pair[0].messages.size() == 2; }));
  EXPECT_EQ(pair[0].endpoint->num_connections(), 2);
  pair[1].send_message();
  pair.unblock(1);
  pair.settle();
  pair[1].write(100);
  EXPECT_EQ(pair[1].num_bytes_sent, 100U);
  pair.settle();
}

/// Random actions in random order.
class PairInAnyOrder : public ::testing::TestWithParam<int> {};

TEST_P(PairInAnyOrder, LosesDoublesAndReordersNothing) {
  Random random(static_cast<uint64_t>(GetParam()));
  Pair pair;
  for (const size_t rank : {0U, 1U}) {
    if (random() % 4 != 0) pair.block(rank);
  }
  for (int i = 0; i < 60; ++i) {
    const size_t rank = random() % 2;
    switch (random() % 8) {
      case 0:
        pair.unblock(rank);
        break;
      case 1:
        pair[rank].send_message();
        break;
      case 2:
        pair[rank].write(random() % 1000);
        break;
      case 3:
        pair[rank].endpoint->connect(pair[rank].peer);
        break;
      default:
        pair[rank].poll();
    }
  }
  for (const size_t rank : {0U, 1U}) {
    pair.unblock(rank);
    pair[rank].send_message();
  }
  pair.settle();
}

INSTANTIATE_TEST_SUITE_P(Seeds, PairInAnyOrder, ::testing::Range(0, 200));

TEST(PairConnection, BringsTheLastWordsOfARankThatEnds) {
  for (const size_t ending : {0U, 1U}) {
    for (const bool both_open_one : {false, true}) {
      Pair pair;
      Side& survivor = pair[1 - ending];
      if (both_open_one) {
        pair.block(0);
        pair.block(1);
        survivor.endpoint->connect(survivor.peer);
      }
      pair[ending].send_message();
      pair[ending].send_message();
      pair[ending].flush();
      pair.unblock(1 - ending);
      pair[ending].endpoint.reset();
      EXPECT_TRUE(
          pair.poll_until([&] { return survivor.endpoint->end_of(survivor.peer).has_value(); }));
      EXPECT_EQ(survivor.messages, (std::vector<uint64_t>{0, 1})) << "rank " << ending << " ended";
    }
  }
}

TEST(PairConnection, EndsWithAPeerThatNobodyHasSentTo) {
  for (const size_t ending : {0U, 1U}) {
    Pair pair;
    Side& survivor = pair[1 - ending];
    pair[ending].endpoint.reset();
    survivor.send_message();
    EXPECT_TRUE(
        pair.poll_until([&] { return survivor.endpoint->end_of(survivor.peer).has_value(); }));
    EXPECT_EQ(survivor.endpoint->end_of(survivor.peer)->find("cannot connect to its process"), 0U);
  }
}

}  // namespace
}  // namespace crossdock::comm
