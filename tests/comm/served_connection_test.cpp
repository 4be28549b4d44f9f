#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <optional>
#include <semaphore>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/memory/descriptor_socket.hpp"
#include "crossdock/error.hpp"
#include "support/forked_child.hpp"

namespace crossdock::comm {
namespace {

using namespace std::chrono_literals;
using Received = DescriptorConnection::Received;
using Sending = DescriptorConnection::Sending;

bool becomes_true(const std::function<bool()>& holds) {
  for (int round = 0; round < 10'000; ++round) {
    if (holds()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

std::optional<DescriptorReceipt> receipt_soon(const DescriptorConnection& connection) {
  std::optional<DescriptorReceipt> receipt;
  becomes_true([&] { return (receipt = connection.receive_receipt()).has_value(); });
  return receipt;
}

Descriptor some_file() {
  return Descriptor(memfd_create("served_connection_test", MFD_CLOEXEC));
}

// A sender, and a receiver that notes what it has received and refuses negative indices.
struct Served {
  DescriptorListener listener;
  std::mutex mutex;
  std::vector<int64_t> taken{};
  std::atomic<int> num_closed = 0;
  std::optional<ServedConnection> there;
  std::optional<DescriptorConnection> here;

  Served() {
    there.emplace(DescriptorConnection(listener.address()),
                  ServedConnection::Handlers{.take = [this](const Received& it) { take(it); },
                                             .closed = [this] { ++num_closed; }});
    here = std::move(listener.accept().at(0));
  }

  void take(const Received& received) {
    received.descriptor();
    if (received.label.index < 0) throw Error(ErrorCode::kInternal, "a negative index");
    const std::lock_guard lock(mutex);
    taken.push_back(received.label.index);
  }
};

TEST(ServedConnection, ReceivesAndConfirmsWhileNobodyCalls) {
  Served served;
  for (const int64_t index : {5, 6, 7}) {
    ASSERT_EQ(served.here->send(some_file(), {.index = index}), Sending::kDone);
    const std::optional<DescriptorReceipt> receipt = receipt_soon(*served.here);
    ASSERT_TRUE(receipt.has_value());
    EXPECT_EQ(receipt->index, index);
    EXPECT_TRUE(receipt->reason().empty());
  }
  const std::lock_guard lock(served.mutex);
  EXPECT_EQ(served.taken, (std::vector<int64_t>{5, 6, 7}));
}

TEST(ServedConnection, TellsTheSenderWhyADescriptorCannotBeUsed) {
  Served served;
  ASSERT_EQ(served.here->send(some_file(), {.index = -3}), Sending::kDone);
  const std::optional<DescriptorReceipt> refused = receipt_soon(*served.here);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->index, -3);
  EXPECT_EQ(refused->reason(), "a negative index");
  ASSERT_EQ(served.here->send(some_file(), {.index = 4}), Sending::kDone);
  const std::optional<DescriptorReceipt> accepted = receipt_soon(*served.here);
  ASSERT_TRUE(accepted.has_value());
  EXPECT_TRUE(accepted->reason().empty());
}

TEST(ServedConnection, KeepsConnectionsApart) {
  Served first;
  Served second;
  ASSERT_EQ(second.here->send(some_file(), {.index = 2}), Sending::kDone);
  ASSERT_TRUE(receipt_soon(*second.here).has_value());
  EXPECT_FALSE(first.here->receive_receipt().has_value());
  second.here.reset();
  EXPECT_TRUE(becomes_true([&] { return second.num_closed == 1; }));
  ASSERT_EQ(first.here->send(some_file(), {.index = 1}), Sending::kDone);
  EXPECT_TRUE(receipt_soon(*first.here).has_value());
  EXPECT_EQ(first.num_closed, 0);
}

TEST(ServedConnection, NoticesOnceThatTheSenderHasClosed) {
  Served served;
  ASSERT_EQ(served.here->send(some_file(), {.index = 1}), Sending::kDone);
  served.here.reset();
  EXPECT_TRUE(served.there->is_closed());
  EXPECT_TRUE(becomes_true([&] { return served.num_closed > 0; }));
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(served.num_closed, 1);
  const std::lock_guard lock(served.mutex);
  EXPECT_EQ(served.taken, std::vector<int64_t>{1});  // earlier messages are not lost
}

TEST(ServedConnection, ShowsTheSenderThatTheReceiverHasClosed) {
  Served served;
  served.there.reset();
  EXPECT_TRUE(becomes_true([&] { return served.here->is_closed(); }));
  EXPECT_EQ(served.here->send(some_file(), {}), Sending::kGone);
}

TEST(ServedConnection, EndsOnlyAfterItsRunningHandler) {
  DescriptorListener listener;
  std::binary_semaphore has_begun{0};
  std::atomic<bool> has_ended = false;
  std::optional<ServedConnection> there;
  there.emplace(DescriptorConnection(listener.address()),
                ServedConnection::Handlers{.take =
                                               [&](const Received&) {
                                                 has_begun.release();
                                                 std::this_thread::sleep_for(50ms);
                                                 has_ended = true;
                                               },
                                           .closed = [] {}});
  const DescriptorConnection here = std::move(listener.accept().at(0));
  ASSERT_EQ(here.send(some_file(), {}), Sending::kDone);
  has_begun.acquire();
  there.reset();
  EXPECT_TRUE(has_ended);
}

// A receiver without room for more receipts waits until the sender has read some.
TEST(ServedConnection, GoesOnWhenTheSenderReadsItsReceipts) {
  Served served;
  constexpr int64_t kMany = 3000;
  int64_t num_sent = 0;
  int64_t num_confirmed = 0;
  const Descriptor file = some_file();
  const auto send_all = [&] {
    while (num_sent < kMany && served.here->send(file, {.index = num_sent}) == Sending::kDone) {
      ++num_sent;
    }
  };
  for (int round = 0; round < 20; ++round) {  // the receipts pile up
    send_all();
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_TRUE(becomes_true([&] {
    while (const auto receipt = served.here->receive_receipt()) {
      EXPECT_EQ(receipt->index, num_confirmed++);
    }
    send_all();
    return num_confirmed == kMany;
  }));
}

TEST(ServedConnection, BlocksSignalsInItsThread) {
  DescriptorListener listener;
  std::atomic<int> num_unblocked = -1;
  const ServedConnection there(
      DescriptorConnection(listener.address()),
      {.take =
           [&](const Received&) {
             sigset_t blocked;
             pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
             int count = 0;
             for (const int one : {SIGINT, SIGTERM, SIGCHLD, SIGUSR1, SIGALRM}) {
               count += sigismember(&blocked, one) == 1 ? 0 : 1;
             }
             num_unblocked = count;
           },
       .closed = [] {}});
  const DescriptorConnection here = std::move(listener.accept().at(0));
  ASSERT_EQ(here.send(some_file(), {}), Sending::kDone);
  ASSERT_TRUE(receipt_soon(here).has_value());
  EXPECT_EQ(num_unblocked, 0);
  sigset_t own;
  pthread_sigmask(SIG_SETMASK, nullptr, &own);
  EXPECT_EQ(sigismember(&own, SIGINT), 0);  // in the thread that started it
}

TEST(ServedConnection, NoticesThatTheSendersProcessHasEnded) {
  SKIP_IF_SANITIZED();
  std::optional<DescriptorListener> listener(std::in_place);
  const DescriptorAddress address = listener->address();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kHangSeconds);
    std::vector<DescriptorConnection> accepted;
    while (accepted.empty()) accepted = listener->accept();
    const bool is_sent = accepted[0].send(some_file(), {.index = 3}) == Sending::kDone;
    _exit(is_sent && receipt_soon(accepted[0]) ? 0 : 1);
  }
  listener.reset();  // the child's copy remains
  std::atomic<int> num_taken = 0;
  std::atomic<int> num_closed = 0;
  const ServedConnection there(
      DescriptorConnection(address),
      {.take = [&](const Received&) { ++num_taken; }, .closed = [&] { ++num_closed; }});
  EXPECT_TRUE(becomes_true([&] { return num_closed == 1; }));
  EXPECT_EQ(num_taken, 1);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// A running handler delays the exit of the process for a moment, but not forever. A forked child
// has its own service.
TEST(ServedConnection, DoesNotKeepTheProcessFromExiting) {
  SKIP_IF_SANITIZED();
  const Served of_parent;
  EXPECT_EQ(exit_status_of_child([]() -> int { std::exit(0); }), 0);
  EXPECT_EQ(exit_status_of_child([]() -> int {
              auto* served = new Served;  // still alive at exit
              if (served->here->send(some_file(), {}) != Sending::kDone) return 1;
              if (!receipt_soon(*served->here)) return 2;
              std::exit(0);
            }),
            0);
  EXPECT_EQ(exit_status_of_child([]() -> int {
              auto* listener = new DescriptorListener;
              auto* has_begun = new std::binary_semaphore(0);
              new ServedConnection(DescriptorConnection(listener->address()),
                                   {.take =
                                        [has_begun](const Received&) {
                                          has_begun->release();
                                          std::this_thread::sleep_for(2s * kHangSeconds);
                                        },
                                    .closed = [] {}});
              const DescriptorConnection here = std::move(listener->accept().at(0));
              if (here.send(some_file(), {}) != Sending::kDone) return 1;
              has_begun->acquire();
              std::exit(0);
            }),
            0);
}

}  // namespace
}  // namespace crossdock::comm
