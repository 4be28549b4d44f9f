#include "comm/descriptor_socket.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>
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

TEST(DescriptorSocket, PassesDescriptorsInOrder) {
  DescriptorListener listener;
  const DescriptorConnection there(listener.address());
  std::vector<DescriptorConnection> accepted = listener.accept();
  ASSERT_EQ(accepted.size(), 1u);
  EXPECT_EQ(accepted[0].send(memory_file("first"), 7), Sending::kDone);
  EXPECT_EQ(accepted[0].send(memory_file("second"), 8), Sending::kDone);
  const DescriptorConnection::Received first = there.receive(10s);
  const DescriptorConnection::Received second = there.receive(10s);
  EXPECT_EQ(first.number, 7);
  EXPECT_EQ(contents_of(first.descriptor), "first");
  EXPECT_EQ(second.number, 8);
  EXPECT_EQ(contents_of(second.descriptor), "second");
}

TEST(DescriptorSocket, PassesDescriptorsToAnotherProcess) {
  DescriptorListener listener;
  const DescriptorAddress address = listener.address();
  const pid_t child = fork();
  if (child == 0) {
    try {
      const DescriptorConnection there(address);
      _exit(contents_of(there.receive(10s).descriptor) == "for a child" ? 0 : 1);
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
  EXPECT_EQ(accepted[0].send(memory_file("for a child"), 0), Sending::kDone);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(accepted[0].is_closed());
  EXPECT_EQ(accepted[0].send(memory_file("too late"), 1), Sending::kGone);
}

TEST(DescriptorSocket, AcceptsOnlyWhoKnowsTheSecret) {
  DescriptorListener listener;
  DescriptorAddress guessed = listener.address();
  guessed.secret[3] ^= std::byte{1};
  const DescriptorConnection stranger(guessed);
  EXPECT_TRUE(listener.accept().empty());
  EXPECT_NE(message_of([&] { stranger.receive(10s); }).find("closed"), std::string::npos);
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

TEST(DescriptorSocket, DoesNotWaitForADescriptorForever) {
  DescriptorListener listener;
  const DescriptorConnection there(listener.address());
  const std::vector<DescriptorConnection> accepted = listener.accept();
  EXPECT_NE(message_of([&] { there.receive(1ms); }).find("in time"), std::string::npos);
  EXPECT_FALSE(accepted[0].is_closed());
}

// A receiver that does not read does not block the sender; what it has missed can be sent later.
TEST(DescriptorSocket, SendingNeverWaits) {
  DescriptorListener listener;
  const DescriptorConnection there(listener.address());
  const std::vector<DescriptorConnection> accepted = listener.accept();
  const Descriptor file = memory_file("many times");
  int64_t sent = 0;
  while (sent < 1'000'000 && accepted[0].send(file, sent) == Sending::kDone) ++sent;
  ASSERT_GT(sent, 0);
  ASSERT_EQ(accepted[0].send(file, sent), Sending::kLater);
  for (int64_t i = 0; i < sent; ++i) ASSERT_EQ(there.receive(10s).number, i);
  EXPECT_EQ(accepted[0].send(file, sent), Sending::kDone);
  EXPECT_EQ(there.receive(10s).number, sent);
}

}  // namespace
}  // namespace crossdock::comm
