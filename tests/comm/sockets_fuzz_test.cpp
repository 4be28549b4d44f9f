// Malformed bytes from peers and strangers are refused and counted, without any other effect.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <random>
#include <thread>

#include "comm/sockets/connection.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/endpoint.hpp"
#include "comm/sockets/store.hpp"

namespace crossdock::comm {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

constexpr int kNumRounds = 10000;

SocketsBlob some_blob() {
  SocketsBlob blob;
  blob.process = identify_this_process();
  blob.address = *parse_address("127.0.0.1", 29500);
  blob.secret = make_secret();
  blob.window_bytes = 4096;
  return blob;
}

Bytes random_bytes(size_t num_bytes, Random& random) {
  Bytes bytes(num_bytes);
  for (std::byte& one : bytes) one = static_cast<std::byte>(random());
  return bytes;
}

/// Flips bits, truncates, or lengthens.
Bytes mutated(Bytes bytes, Random& random) {
  const Bytes original = bytes;
  do {
    switch (random() % 3) {
      case 0:
        if (!bytes.empty()) {
          bytes[random() % bytes.size()] ^= static_cast<std::byte>(1U << (random() % 8));
        }
        break;
      case 1:
        bytes.resize(random() % (bytes.size() + 1));
        break;
      default: {
        const Bytes more = random_bytes(1 + random() % 64, random);
        bytes.insert(bytes.end(), more.begin(), more.end());
      }
    }
  } while (bytes == original);
  return bytes;
}

template <typename Payload>
Bytes frame(FrameHeader header, const Payload& payload) {
  header.payload_bytes = sizeof payload;
  Bytes bytes(sizeof header + sizeof payload);
  std::memcpy(bytes.data(), &header, sizeof header);
  std::memcpy(bytes.data() + sizeof header, &payload, sizeof payload);
  return bytes;
}

TEST(Blobs, SurviveTheJourney) {
  const SocketsBlob blob = some_blob();
  const auto decoded = decode_blob(encode(blob));
  ASSERT_TRUE(decoded.blob.has_value()) << decoded.flaw;
  EXPECT_EQ(decoded.blob->address, blob.address);
  EXPECT_EQ(decoded.blob->process.pid, blob.process.pid);
  EXPECT_EQ(decoded.blob->window_bytes, blob.window_bytes);
  EXPECT_TRUE(is_equal(decoded.blob->secret, blob.secret));
}

TEST(Blobs, AreRefusedIfAnyBitIsWrong) {
  Random random(1);
  const Bytes valid = encode(some_blob());
  for (int round = 0; round < kNumRounds; ++round) {
    const auto decoded = decode_blob(mutated(valid, random));
    EXPECT_FALSE(decoded.blob.has_value());
    EXPECT_FALSE(decoded.flaw.empty());
    EXPECT_FALSE(decode_blob(random_bytes(random() % 300, random)).blob.has_value());
  }
}

TEST(Blobs, OfAnotherVersionAreKnownAsSuch) {
  SocketsBlob blob = some_blob();
  blob.version = kSocketsVersion + 1;
  const auto decoded = decode_blob(encode(blob));
  EXPECT_FALSE(decoded.blob.has_value());
  EXPECT_TRUE(decoded.is_foreign_version);
}

TEST(StoreBlobs, AreRefusedIfMalformed) {
  Random random(2);
  for (int round = 0; round < kNumRounds; ++round) {
    read_blobs(random_bytes(random() % 200, random), static_cast<int>(1 + random() % 4));
  }
  Bytes valid(sizeof(uint32_t) + 3);
  valid[0] = std::byte{3};
  EXPECT_EQ(read_blobs(valid, 1).size(), 1U);
  valid[0] = std::byte{4};
  EXPECT_TRUE(read_blobs(valid, 1).empty());
}

TEST(Frames, OfAnyBytesNeitherCrashNorGrow) {
  Random random(3);
  const Bytes control =
      frame({.kind = FrameHeader::Kind::kControl, .comm_id = 1}, ControlMessage{});
  for (int round = 0; round < kNumRounds; ++round) {
    int ends[2] = {};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    Connection connection(Socket(ends[0]), /*peer=*/round % 2 - 1, /*is_connecting=*/false);
    const Socket other(ends[1]);
    const Bytes bytes =
        round % 4 == 0 ? random_bytes(random() % 2000, random) : mutated(control, random);
    ASSERT_EQ(send(other.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    connection.read([](const FrameHeader& header, std::span<const std::byte> payload) {
      EXPECT_LE(payload.size(), kMaxPayloadBytes);
      return header.kind != FrameHeader::Kind::kControl ||
             is_valid(read_payload<ControlMessage>(payload), 8);
    });
  }
}

TEST(Frames, AreOversizedIfTheyClaimMoreThanTheLimit) {
  FrameHeader header{
      .kind = FrameHeader::Kind::kData, .payload_bytes = kMaxPayloadBytes, .comm_id = 1};
  EXPECT_TRUE(is_valid(header, true));
  EXPECT_FALSE(is_valid(header, false));
  header.payload_bytes = kMaxPayloadBytes + 1;
  EXPECT_FALSE(is_valid(header, true));
}

/// A process that listens, in a world of two.
class ListeningRank : public ::testing::Test {
 protected:
  explicit ListeningRank(const StrangerLimits& limits = {}) {
    Socket listener = std::move(*listen_at(*parse_address("127.0.0.1", 0)));
    SocketsWorld world{.rank = 0, .blobs = {some_blob(), some_blob()}, .id = 7};
    address_ = address_of(listener);
    world.blobs[0].address = address_;
    // Closed at the end of this constructor: the peer refuses connections.
    const Socket closed = std::move(*listen_at(*parse_address("127.0.0.1", 0)));
    world.blobs[1].address = address_of(closed);
    secret_ = world.blobs[0].secret;
    endpoint_ =
        std::make_unique<Endpoint>(std::move(listener), std::make_unique<Directory>(secret_),
                                   std::move(world), SocketsOptions{.window_bytes = 4096}, limits);
    endpoint_->open_communicator(1);
  }

  Bytes hello() const {
    return frame({.kind = FrameHeader::Kind::kHello},
                 Hello{.version = kSocketsVersion, .rank = 1, .world = 7, .secret = secret_});
  }

  /// Opens a connection, sends the bytes and lets the endpoint read them.
  Socket say(const Bytes& bytes) {
    Socket socket = connect_and_send(bytes);
    for (int i = 0; i < 3; ++i) endpoint_->poll();
    return socket;
  }

  Socket connect_and_send(const Bytes& bytes) const {
    int error = 0;
    Socket socket = start_connecting(address_, error);
    EXPECT_EQ(error, 0);
    for (int i = 0; i < 100; ++i) {
      if (send(socket.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size())) {
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return socket;
  }

  /// Polls until the condition holds. Returns whether it does.
  bool polls_until(const std::function<bool()>& condition) {
    const auto end = Clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      if (Clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      endpoint_->poll();
    }
    return true;
  }

  SocketAddress address_;
  Secret secret_{};
  std::unique_ptr<Endpoint> endpoint_;
};

/// Allocated bytes; 0 under sanitizers, which have their own allocator.
int64_t heap_bytes() {
  return static_cast<int64_t>(mallinfo2().uordblks);
}

ptrdiff_t num_open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

TEST_F(ListeningRank, RefusesStrangersAndCountsThem) {
  Random random(4);
  const auto let_strangers_come = [&](int num_strangers) {
    const int64_t expected = endpoint_->counters().refused_connections + num_strangers;
    for (int round = 0; round < num_strangers; ++round) {
      Bytes bytes = round % 2 == 0 ? random_bytes(1 + random() % 200, random) : hello();
      if (round % 2 == 1) {  // a wrong secret, version, world or rank, or a malformed header
        bytes[random() % bytes.size()] ^= static_cast<std::byte>(1U << (random() % 8));
      }
      say(bytes);
    }
    EXPECT_TRUE(polls_until([&] { return endpoint_->counters().refused_connections == expected; }))
        << endpoint_->counters().refused_connections << " of " << expected;
  };
  let_strangers_come(100);
  const int64_t heap_before = heap_bytes();
  const ptrdiff_t files_before = num_open_files();
  let_strangers_come(kNumRounds);
  EXPECT_LT(heap_bytes(), heap_before + (1 << 20));
  EXPECT_EQ(num_open_files(), files_before);
  EXPECT_FALSE(endpoint_->end_of(1).has_value());
  const Socket peer = say(hello());
  endpoint_->poll();
  EXPECT_FALSE(endpoint_->end_of(1).has_value());
}

TEST_F(ListeningRank, NamesAPeerThatSendsMalformedFrames) {
  const Socket peer = say(hello());
  const Bytes nonsense(100, std::byte{0x55});
  ASSERT_EQ(send(peer.descriptor(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL), 100);
  EXPECT_TRUE(polls_until([&] { return endpoint_->end_of(1).has_value(); }));
  EXPECT_EQ(endpoint_->end_of(1), "it sent a malformed frame");
  EXPECT_EQ(endpoint_->counters().malformed_frames, 1);
}

TEST_F(ListeningRank, NamesAPeerThatSendsMoreThanItsCredit) {
  const Socket peer = say(hello());
  const Bytes data =
      frame({.kind = FrameHeader::Kind::kData, .comm_id = 1}, std::array<std::byte, 3000>{});
  for (int i = 0; i < 2; ++i) {
    send(peer.descriptor(), data.data(), data.size(), MSG_NOSIGNAL);
  }
  EXPECT_TRUE(polls_until([&] { return endpoint_->end_of(1).has_value(); }));
  EXPECT_EQ(endpoint_->end_of(1), "it sent a malformed frame");
}

TEST_F(ListeningRank, SeesAtOnceThatAPeerHasClosedItsConnection) {
  { const Socket peer = say(hello()); }
  EXPECT_TRUE(polls_until([&] { return endpoint_->end_of(1).has_value(); }));
  EXPECT_EQ(endpoint_->end_of(1), "its connection was closed");
}

TEST_F(ListeningRank, HearsOutAPeerThatNoLongerListens) {
  endpoint_->connect(1);  // is refused
  {
    const Socket peer = connect_and_send(hello());
    for (int i = 0; i < 3; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      endpoint_->poll();
    }
    EXPECT_FALSE(endpoint_->end_of(1).has_value());
    const Bytes data =
        frame({.kind = FrameHeader::Kind::kData, .comm_id = 1}, std::array<std::byte, 100>{});
    send(peer.descriptor(), data.data(), data.size(), MSG_NOSIGNAL);
    EXPECT_TRUE(polls_until([&] { return endpoint_->has_unread(1, 1); }));
    EXPECT_FALSE(endpoint_->end_of(1).has_value());
  }
  EXPECT_TRUE(polls_until([&] { return endpoint_->end_of(1).has_value(); }));
}

TEST(Connection, ReadsWhatAPeerSentBeforeItsEndAlsoIfItCannotWrite) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  Connection connection(Socket(ends[0]), /*peer=*/1, /*is_connecting=*/false);
  const Bytes control =
      frame({.kind = FrameHeader::Kind::kControl, .comm_id = 1}, ControlMessage{});
  ASSERT_EQ(send(ends[1], control.data(), control.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(control.size()));
  ::close(ends[1]);
  const Bytes data(100);
  connection.send_data({.kind = FrameHeader::Kind::kData, .payload_bytes = 100, .comm_id = 1},
                       data);
  EXPECT_FALSE(connection.takes_data());
  EXPECT_FALSE(connection.is_flushed());  // the written bytes are lost
  int num_frames = 0;
  for (int i = 0; i < 2; ++i) {
    connection.read([&](const FrameHeader&, std::span<const std::byte>) {
      ++num_frames;
      return true;
    });
  }
  EXPECT_EQ(num_frames, 1);
  EXPECT_TRUE(connection.is_closed());
  EXPECT_FALSE(connection.is_flushed());
}

TEST_F(ListeningRank, KeepsAPeerOutOfReachOfManySilentStrangers) {
  std::vector<Socket> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(say({std::byte{1}}));
  const Socket peer = say(hello());
  const Bytes control =
      frame({.kind = FrameHeader::Kind::kControl, .comm_id = 1}, ControlMessage{});
  send(peer.descriptor(), control.data(), control.size(), MSG_NOSIGNAL);
  EXPECT_TRUE(polls_until([&] { return endpoint_->take_control(1).has_value(); }));
  EXPECT_FALSE(endpoint_->end_of(1).has_value());
}

/// Strangers occupy all places, and one more waits to be accepted.
class FullRank : public ListeningRank {
 protected:
  explicit FullRank(const StrangerLimits& limits) : ListeningRank(limits) {
    for (ptrdiff_t i = 0; i <= limits.max_strangers; ++i) {
      strangers_.push_back(say({std::byte{1}}));
    }
  }
  std::vector<Socket> strangers_;
};

class PatientRank : public FullRank {
 protected:
  PatientRank()
      : FullRank({.hello_time = std::chrono::hours(1), .busy_time = std::chrono::hours(1)}) {}
};

TEST_F(PatientRank, SleepsAlthoughAStrangerWaits) {
  const auto begin = Clock::now();
  endpoint_->wait_for_sockets(std::chrono::milliseconds(50));
  EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(50));
  EXPECT_EQ(endpoint_->counters().refused_connections, 0);
}

class HastyRank : public FullRank {
 protected:
  static constexpr ptrdiff_t kMaxStrangers = 5;
  HastyRank()
      : FullRank({.max_strangers = kMaxStrangers,
                  .hello_time = std::chrono::milliseconds(100),
                  .busy_time = std::chrono::hours(1)}) {}
};

TEST_F(HastyRank, DropsAndCountsSilentStrangers) {
  EXPECT_TRUE(
      polls_until([&] { return endpoint_->counters().refused_connections == kMaxStrangers + 1; }));
  const Socket peer = say(hello());
  const Bytes control =
      frame({.kind = FrameHeader::Kind::kControl, .comm_id = 1}, ControlMessage{});
  send(peer.descriptor(), control.data(), control.size(), MSG_NOSIGNAL);
  EXPECT_TRUE(polls_until([&] { return endpoint_->take_control(1).has_value(); }));
}

/// After a hello, frames with a wrong bit.
class FaultyPeer : public ListeningRank, public ::testing::WithParamInterface<int> {};

TEST_P(FaultyPeer, IsEitherUnderstoodOrNamed) {
  Random random(static_cast<uint64_t>(GetParam()));
  const Socket peer = say(hello());
  for (int i = 0; i < 100 && !endpoint_->end_of(1); ++i) {
    const Bytes valid =
        random() % 2 == 0
            ? frame({.kind = FrameHeader::Kind::kControl, .comm_id = random() % 3},
                    ControlMessage{})
            : frame({.kind = FrameHeader::Kind::kData, .comm_id = 1, .position = random() % 2},
                    std::array<std::byte, 100>{});
    const Bytes bytes = mutated(valid, random);
    send(peer.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    endpoint_->poll();
    while (endpoint_->take_control(1)) {
    }
  }
  EXPECT_FALSE(endpoint_->end_of(0).has_value());
}

INSTANTIATE_TEST_SUITE_P(Seeds, FaultyPeer, ::testing::Range(0, 200));

}  // namespace
}  // namespace crossdock::comm
