#include "comm/memory/descriptor_socket.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "crossdock/error.hpp"
#include "support/message_of.hpp"

namespace crossdock::comm {
namespace {

using namespace std::chrono_literals;
using Sending = DescriptorConnection::Sending;

Descriptor memory_file(const std::string& contents) {
  Descriptor file(memfd_create("descriptor_socket_test", MFD_CLOEXEC));
  EXPECT_EQ(pwrite(file.number(), contents.data(), contents.size(), 0), std::ssize(contents));
  return file;
}

std::string contents_of(const Descriptor& file) {
  std::array<char, 64> bytes{};
  const ssize_t num_bytes = pread(file.number(), bytes.data(), bytes.size(), 0);
  return num_bytes < 0 ? "unreadable" : std::string(bytes.data(), static_cast<size_t>(num_bytes));
}

// Polls until something has arrived.
template <typename Look>
auto await(const Look& look) {
  for (int round = 0; round < 10'000; ++round) {
    if (auto found = look()) return found;
    std::this_thread::sleep_for(1ms);
  }
  throw Error(ErrorCode::kTimeout, "nothing has arrived");
}

DescriptorConnection::Received receive_soon(const DescriptorConnection& connection) {
  return *await([&] { return connection.receive(); });
}

// Both ends of a connection: descriptors go from `here` to `there`.
struct Ends {
  DescriptorListener listener;
  DescriptorConnection there{listener.address()};
  DescriptorConnection here = std::move(listener.accept().at(0));
};

TEST(DescriptorSocket, PassesDescriptorsInOrder) {
  const Ends ends;
  EXPECT_FALSE(ends.there.receive().has_value());
  EXPECT_EQ(ends.here.send(memory_file("first"), {.index = 7, .num_bytes = 70}), Sending::kDone);
  EXPECT_EQ(ends.here.send(memory_file("second"), {.index = 8, .num_bytes = 80}), Sending::kDone);
  const DescriptorConnection::Received first = receive_soon(ends.there);
  const DescriptorConnection::Received second = receive_soon(ends.there);
  EXPECT_EQ(first.label.index, 7);
  EXPECT_EQ(first.label.num_bytes, 70);
  EXPECT_EQ(contents_of(first.descriptor()), "first");
  EXPECT_EQ(second.label.index, 8);
  EXPECT_EQ(second.label.num_bytes, 80);
  EXPECT_EQ(contents_of(second.descriptor()), "second");
  EXPECT_FALSE(ends.there.receive().has_value());
}

TEST(DescriptorSocket, ReturnsReceipts) {
  const Ends ends;
  EXPECT_FALSE(ends.here.receive_receipt().has_value());
  EXPECT_EQ(ends.there.send_receipt({.index = 7}), Sending::kDone);
  EXPECT_EQ(ends.there.send_receipt(DescriptorReceipt::of_failure(8, "no room")), Sending::kDone);
  const std::string long_reason(1000, 'x');
  EXPECT_EQ(ends.there.send_receipt(DescriptorReceipt::of_failure(9, long_reason)), Sending::kDone);
  const auto receive = [&] { return *await([&] { return ends.here.receive_receipt(); }); };
  const DescriptorReceipt good = receive();
  EXPECT_EQ(good.index, 7);
  EXPECT_TRUE(good.reason().empty());
  const DescriptorReceipt bad = receive();
  EXPECT_EQ(bad.index, 8);
  EXPECT_EQ(bad.reason(), "no room");
  const DescriptorReceipt truncated = receive();
  EXPECT_EQ(truncated.index, 9);
  EXPECT_EQ(truncated.reason(), long_reason.substr(0, truncated.failure.size() - 1));
  EXPECT_FALSE(ends.here.receive_receipt().has_value());
}

// Even if the sender has not read its receipts, in which case the system resets the connection.
TEST(DescriptorSocket, DeliversWhatWasSentBeforeTheSenderClosed) {
  for (const bool has_unread_receipt : {false, true}) {
    SCOPED_TRACE(has_unread_receipt);
    DescriptorListener listener;
    const DescriptorConnection there(listener.address());
    {
      const std::vector<DescriptorConnection> accepted = listener.accept();
      ASSERT_EQ(accepted.size(), 1u);
      EXPECT_EQ(accepted[0].send(memory_file("last"), {.index = 4}), Sending::kDone);
      if (has_unread_receipt) {
        EXPECT_EQ(there.send_receipt({.index = 3}), Sending::kDone);
      }
    }
    EXPECT_TRUE(there.is_closed());
    const DescriptorConnection::Received last = receive_soon(there);
    EXPECT_EQ(last.label.index, 4);
    EXPECT_EQ(contents_of(last.descriptor()), "last");
    EXPECT_NE(message_of([&] { there.receive(); }, ErrorCode::kCommunication).find("closed"),
              std::string::npos);
    EXPECT_EQ(there.send_receipt({.index = 4}), Sending::kGone);
  }
}

TEST(DescriptorSocket, SaysThatADescriptorWasWithheld) {
  const Ends ends;
  ASSERT_EQ(ends.here.send(memory_file("withheld"), {.index = 2}), Sending::kDone);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const DescriptorConnection::Received received = receive_soon(ends.there);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(received.label.index, 2);
  EXPECT_NE(message_of([&] { received.descriptor(); }, ErrorCode::kCommunication).find("ulimit -n"),
            std::string::npos);
}

TEST(DescriptorSocket, PassesDescriptorsToAnotherProcess) {
  DescriptorListener listener;
  const DescriptorAddress address = listener.address();
  const pid_t child = fork();
  if (child == 0) {
    try {
      const DescriptorConnection there(address);
      _exit(contents_of(receive_soon(there).descriptor()) == "for a child" ? 0 : 1);
    } catch (...) {
      _exit(2);
    }
  }
  std::vector<DescriptorConnection> accepted;
  for (int round = 0; round < 10'000 && accepted.empty(); ++round) {
    std::this_thread::sleep_for(1ms);
    accepted = listener.accept();
  }
  ASSERT_EQ(accepted.size(), 1u);
  EXPECT_EQ(accepted[0].send(memory_file("for a child"), {}), Sending::kDone);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(accepted[0].is_closed());
  EXPECT_EQ(accepted[0].send(memory_file("too late"), {}), Sending::kGone);
}

TEST(DescriptorSocket, AcceptsOnlyWhoKnowsTheSecret) {
  DescriptorListener listener;
  DescriptorAddress guessed = listener.address();
  guessed.secret[3] ^= std::byte{1};
  const DescriptorConnection stranger(guessed);
  EXPECT_TRUE(listener.accept().empty());
  EXPECT_NE(message_of([&] { stranger.receive(); }).find("closed"), std::string::npos);
  const DescriptorConnection known(listener.address());
  EXPECT_EQ(listener.accept().size(), 1u);
}

TEST(DescriptorSocket, SaysThatNobodyListens) {
  DescriptorAddress gone;
  {
    const DescriptorListener listener;
    gone = listener.address();
  }
  EXPECT_NE(message_of([&] { const DescriptorConnection there(gone); }).find("cannot connect"),
            std::string::npos);
}

// A receiver that does not read does not block the sender; messages it missed can be sent later.
TEST(DescriptorSocket, SendingNeverWaits) {
  const Ends ends;
  const Descriptor file = memory_file("many times");
  const auto send = [&](int64_t index) { return ends.here.send(file, {.index = index}); };
  int64_t sent = 0;
  while (sent < 1'000'000 && send(sent) == Sending::kDone) ++sent;
  ASSERT_GT(sent, 0);
  ASSERT_EQ(send(sent), Sending::kLater);
  for (int64_t i = 0; i < sent; ++i) ASSERT_EQ(receive_soon(ends.there).label.index, i);
  EXPECT_EQ(send(sent), Sending::kDone);
  EXPECT_EQ(receive_soon(ends.there).label.index, sent);
}

}  // namespace
}  // namespace crossdock::comm
