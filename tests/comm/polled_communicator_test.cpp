// How a rank handles control messages from its peers, in orders that real peers produce only by
// chance.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "comm/child_process.hpp"
#include "comm/polled/communicator.hpp"

namespace crossdock::comm {
namespace {

using ::testing::HasSubstr;
using Kind = ControlMessage::Kind;

constexpr int kSize = 4;
constexpr int kSelf = 1;

struct Letter {
  int peer = 0;
  ControlMessage message;
};

/// Delivers one batch of messages per poll and keeps those that are sent.
class ScriptedControl final : public ControlLinks {
 public:
  void send(int peer, const ControlMessage& message) override { sent.push_back({peer, message}); }
  void send_to_all_others(const ControlMessage& message) override {
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer != kSelf) send(peer, message);
    }
  }
  void say_goodbye(const ControlMessage& /*message*/) const override {}
  void poll(const std::function<void(int sender, const ControlMessage&)>& handle) override {
    if (batches.empty()) return;
    const std::vector<Letter> batch = std::move(batches.front());
    batches.pop_front();
    for (const Letter& letter : batch) handle(letter.peer, letter.message);
  }

  std::deque<std::vector<Letter>> batches;
  std::vector<Letter> sent;
};

/// Nothing ever arrives from any peer.
class SilentTransfers final : public Transfers {
 public:
  bool is_done() const override { return false; }
  bool advance() override { return false; }
  bool is_pending(int peer) const override { return peer != kSelf; }
  bool has_arrived(int /*peer*/) const override { return false; }
  int size() const override { return kSize; }
};

class ScriptedCommunicator final : public PolledCommunicator {
 public:
  explicit ScriptedCommunicator(std::vector<ProcessIdentity> processes)
      : PolledCommunicator(kSelf,
                           {.topology = Topology::single_node(kSize), .processes = processes}) {}

  std::string_view name() const override { return "scripted"; }
  std::unique_ptr<Communicator> subgroup(std::span<const int> /*members*/) override {
    return nullptr;
  }

  ScriptedControl script;
  std::vector<Letter> last_letters;  // arrive after the regular poll, while peers are examined
  std::optional<ControlMessage> left_refusal;

 protected:
  std::optional<ControlMessage> refusal() const override { return left_refusal; }
  ControlLinks& control() override { return script; }
  std::unique_ptr<Transfers> start(ExchangeArgs /*args*/, Traffic& /*traffic*/) override {
    return std::make_unique<SilentTransfers>();
  }
  void check_interrupt(const WaitContext& /*wait*/) override { script.batches = {last_letters}; }
  void pause(std::chrono::nanoseconds idle) override {
    script.batches.clear();
    PolledCommunicator::pause(idle);
  }
};

std::vector<ProcessIdentity> living_processes() {
  return std::vector<ProcessIdentity>(kSize, identify_this_process());
}

/// The error of an exchange that must fail.
Error failed_exchange(ScriptedCommunicator& communicator) {
  const std::vector<int64_t> nothing(kSize + 1, 0);
  const WaitContext wait{.operation = "dispatch",
                         .sequence = 7,
                         .arrival = std::chrono::seconds(100),
                         .progress = std::chrono::seconds(100)};
  try {
    communicator.all_to_all_v({}, nothing, {}, nothing, wait);
  } catch (const Error& error) {
    return error;
  }
  throw std::logic_error("the exchange succeeded");
}

ControlMessage abort_of(int rank) {
  return abort_message({.code = ErrorCode::kPeerFailed,
                        .culprit = rank,
                        .reporter = rank,
                        .sequence = 7,
                        .operation = "dispatch",
                        .text = "the device is gone"});
}

TEST(PolledCommunicator, PassesOnWhyAPeerGaveUp) {
  ScriptedCommunicator communicator(living_processes());
  communicator.script.batches = {{{3, abort_of(3)}}};
  EXPECT_EQ(failed_exchange(communicator).context().culprit, 3);
  ASSERT_EQ(communicator.script.sent.size(), kSize - 1);
  for (const Letter& letter : communicator.script.sent) {
    EXPECT_EQ(letter.message.kind, Kind::kAbort);
    EXPECT_EQ(letter.message.culprit, 3);
    EXPECT_EQ(letter.message.reporter, 3);
  }
}

TEST(PolledCommunicator, PassesOnTheFirstReasonOnly) {
  ScriptedCommunicator communicator(living_processes());
  communicator.script.batches = {{{3, abort_of(3)}, {0, abort_of(3)}, {2, abort_of(2)}}};
  EXPECT_EQ(failed_exchange(communicator).context().culprit, 3);
  EXPECT_EQ(communicator.script.sent.size(), kSize - 1);
}

TEST(PolledCommunicator, BlamesTheFirstToFailNotARankThatLeftBecauseOfIt) {
  ScriptedCommunicator communicator(living_processes());
  // Rank 3 has not reached this rank yet; rank 0 passed its message on and left.
  communicator.script.batches = {{{0, abort_of(3)}, {0, left_message("it threw", 1, 1)}}};
  const Error error = failed_exchange(communicator);
  EXPECT_EQ(error.context().culprit, 3);
  EXPECT_THAT(error.what(), HasSubstr("rank 3 gave up: the device is gone"));
}

TEST(PolledCommunicator, BlamesWhatMadeAProcessGiveUpNotItsEnd) {
  ChildProcess child;
  auto processes = living_processes();
  processes[2] = child.identity();
  ScriptedCommunicator communicator(std::move(processes));
  communicator.left_refusal = abort_of(3);
  child.end();
  EXPECT_THAT(failed_exchange(communicator).what(),
              HasSubstr("rank 3 gave up: the device is gone"));
}

TEST(PolledCommunicator, ReadsTheLastMessagesOfAProcessThatHasEnded) {
  ChildProcess child;
  std::vector<ProcessIdentity> processes = living_processes();
  processes[0] = child.identity();
  ScriptedCommunicator silent(processes);
  ScriptedCommunicator informed(processes);
  child.end();
  EXPECT_EQ(failed_exchange(silent).context().culprit, 0);
  informed.last_letters = {{0, abort_of(3)}};
  EXPECT_EQ(failed_exchange(informed).context().culprit, 3);
}

}  // namespace
}  // namespace crossdock::comm
